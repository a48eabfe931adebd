import json
import re
import sys
from types import SimpleNamespace

import pytest

from spmd_tx.cli import main
from tests.support.databases import make_database


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run ``spmd-tx keys`` on one data directory."""
    make_database(tmp_path / "data")

    def run(*arguments: str, data_dir=tmp_path / "data") -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["spmd-tx", "keys", *arguments, "--data-dir", str(data_dir)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit_:
            main.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=exit_.value.code or 0, out=printed.out, err=printed.err)

    return run


def rows(text: str) -> list[list[str]]:
    """Return the rows of a table, without its heading."""
    lines = [line for line in text.splitlines() if "│" in line]
    return [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines]


def test_a_new_key_alone_is_what_a_script_reads(run):
    made = run("create", "--owner", "alice")
    assert re.fullmatch(r"tml-[0-9a-f]{48}\n", made.out)
    assert made.out.strip() not in made.err
    ((_, owner, role, _, ends, used, limits, state),) = rows(made.err)
    assert (owner, role, ends, used, limits, state) == ("alice", "user", "never", "never", "none", "valid")


def test_a_script_reads_the_list_as_json(run):
    run("create", "--owner", "alice")
    (key,) = json.loads(run("list", "--json").out)
    assert (key["owner"], key["role"], key["state"]) == ("alice", "user", "valid")


def test_keys_are_listed_without_what_would_let_somebody_in(run):
    limits = "--adapters 2 --queued-requests 64 --requests-per-second 2.5 --expires-days 30".split()
    tokens = [run("create", "--owner", "alice", "--role", "admin", *limits).out.strip()]
    tokens.append(run("create", "--owner", "bob").out.strip())
    listed = run("list").out
    assert not any(token in listed for token in tokens)
    first, second = rows(listed)
    assert (first[1:3], first[6]) == (["alice", "admin"], "2 adapters, 64 queued requests, 2.5 requests/s")
    assert second[1:3] == ["bob", "user"]


def test_a_key_can_be_revoked_and_rotated(run):
    run("create", "--owner", "alice")
    ((id, *_),) = rows(run("list").out)
    assert run("rotate", id, "--overlap-hours", "0").out.startswith("tml-")
    assert [row[-1] for row in rows(run("list").out)] == ["expired", "valid"]
    new = rows(run("list").out)[1][0]
    assert run("revoke", new[:-1]).code == 0
    assert [row[-1] for row in rows(run("list").out)] == ["expired", "revoked"]
    again = run("rotate", new)
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert f"key {new} was revoked" in again.err


def test_the_first_key_of_a_script_that_runs_again_is_the_only_one(run):
    first = run("create", "--owner", "admin", "--role", "admin", "--if-none")
    second = run("create", "--owner", "admin", "--role", "admin", "--if-none")
    assert first.out.startswith("tml-")
    assert (second.code, second.out) == (0, "")
    assert len(rows(run("list").out)) == 1


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["create", "--owner", "a b"], "--owner is 'a b'"),
        (["create", "--owner", "a", "--adapters", "0"], "--adapters is 0; it must be more than 0"),
        (["create", "--owner", "a", "--expires-days", "-1"], "--expires-days is -1; it must be more than 0"),
        (["create", "--owner", "a", "--expires-days", "1e9"], "--expires-days is 1e+09; it must be"),
        (["create", "--owner", "a", "--expires-days", "nan"], "--expires-days"),
        (["create", "--owner", "a", "--requests-per-second", "inf"], "--requests-per-second is inf"),
        (["create", "--owner", "a", "--adapters", str(10**20)], "--adapters is 1e+20; it must be"),
        (["rotate", "k", "--overlap-hours", "inf"], "--overlap-hours is inf; it must be from 0 to"),
        (["create", "--owner", "a", "--role", "god"], "'god' is not one of"),
        (["revoke", "nobody"], "there is no key 'nobody'"),
    ],
)
def test_what_cannot_be_done_is_named(run, arguments, complaint):
    run("create", "--owner", "alice")
    result = run(*arguments)
    assert result.code == 2
    assert complaint in result.err


def test_a_directory_that_is_not_there_has_no_keys(run, tmp_path):
    for arguments in (["list"], ["revoke", "k"], ["rotate", "k"]):
        result = run(*arguments, data_dir=tmp_path / "typo")
        assert (result.code, "there is no database" in result.err and "typo" in result.err) == (2, True)
    assert not (tmp_path / "typo").exists()


def test_all_keys_can_be_removed(run, tmp_path):
    run("create", "--owner", "alice")
    run("create", "--owner", "bob")
    assert "removed 2 keys" in run("remove-all").out
    assert rows(run("list").out) == []
    assert run("remove-all", data_dir=tmp_path / "nowhere").code == 2
