import pytest
import zmq

from spmd_tx.errors import StartError
from spmd_tx.protocol.secret import Keys, read_secret

SECRET = "0123456789abcdef"


def test_the_file_comes_before_the_environment(tmp_path, monkeypatch):
    assert read_secret(None) is None
    monkeypatch.setenv("SPMD_TX_SECRET", "of the environment")
    assert read_secret(None) == "of the environment"
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    assert read_secret(tmp_path / "secret") == SECRET


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StartError, match=r"--secret-file .*absent: .*openssl rand -hex 32"):
        read_secret(tmp_path / "absent")


def test_a_short_secret_is_refused_and_not_told(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMD_TX_SECRET", "guess")
    with pytest.raises(StartError, match="SPMD_TX_SECRET has 5 characters, fewer than 16") as refused:
        read_secret(None)
    assert "guess" not in str(refused.value)


def test_keys_follow_from_the_secret_and_differ_between_the_ends():
    keys = Keys.of(SECRET)
    assert keys == Keys.of(SECRET)
    assert keys.server_secret != keys.client_secret
    assert keys.server_public == zmq.curve_public(keys.server_secret)
    assert {keys.server_secret, keys.client_secret}.isdisjoint(
        {Keys.of(SECRET + "0").server_secret, Keys.of(SECRET + "0").client_secret}
    )
