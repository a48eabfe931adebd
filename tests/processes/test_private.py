import os
import stat
import subprocess
import sys

import pytest

from spmd_tx.cli import main
from spmd_tx.processes.environments import of_foreign_code, of_worker
from spmd_tx.processes.private import Hidden, warning_about, without_password

URL = "postgresql://server:hunter2@db/spmd_tx"


@pytest.mark.parametrize("option", [["--database-url", URL], [f"--database-url={URL}"]])
def test_a_password_moves_from_the_arguments_to_the_environment(option):
    hidden = without_password(["-m", "spmd_tx.cli.main", "serve", *option, "--port=1"])
    assert hidden == Hidden(["-m", "spmd_tx.cli.main", "serve", "--port=1"], URL)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "1"],
        ["serve", "--database-url"],
        ["serve", "--database-url", "postgresql://server@db/spmd_tx"],
        ["serve", "--database-url=sqlite:////a/b:c/d@e"],
    ],
)
def test_other_arguments_stay(arguments):
    assert without_password(arguments) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_command_with_a_password_shows_none(tmp_path):
    """It is shown by the process itself, which looks at its own arguments when it is about to open."""
    look = (
        "import sys, types\n"
        "from spmd_tx.cli import main\n"
        "async def collect(data_dir, database_url, *_):\n"
        "    print(open('/proc/self/cmdline').read().replace(chr(0), ' '))\n"
        "    print('url', database_url)\n"
        "    return []\n"
        "reaper = types.SimpleNamespace(collect=collect, table=str)\n"
        "sys.modules['spmd_tx.coordinator.retention.reaper'] = reaper\n"
        "main.main()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", look, "gc", "--database-url", URL, "--data-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    shown, _, rest = ran.stdout.partition("url ")
    assert f"gc --data-dir {tmp_path}" in shown, ran.stderr
    assert "hunter2" not in shown
    assert rest.startswith(URL)


def test_a_new_data_directory_is_its_owners_alone(tmp_path, monkeypatch):
    """Whatever the shell's umask says."""
    data_dir = tmp_path / "data"
    command = ["spmd-tx", "keys", "create", "--owner", "alice", "--data-dir", str(data_dir)]
    monkeypatch.setattr(sys, "argv", command)
    before = os.umask(0o022)
    try:
        with pytest.raises(SystemExit) as ended:
            main.main()
    finally:
        os.umask(before)
    assert ended.value.code in (0, None)
    made = [data_dir, *data_dir.rglob("*")]
    assert len(made) > 1
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in made} == {0}
    assert warning_about(data_dir) is None


def test_a_directory_that_is_open_to_others_is_warned_of_with_the_remedy_and_left_alone(tmp_path):
    tmp_path.chmod(0o755)
    assert f"chmod -R go= {tmp_path}" in (warning_about(tmp_path) or "")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


SECRETS = """
    SPMD_TX_SECRET SPMD_TX_DATABASE_URL DATABASE_URL PGPASSWORD
    AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_PROFILE AZURE_STORAGE_CONNECTION_STRING
    GOOGLE_APPLICATION_CREDENTIALS HF_TOKEN HUGGING_FACE_HUB_TOKEN OPENAI_API_KEY
"""
NEEDED = """
    PATH LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES TPU_CHIPS_PER_HOST_BOUNDS XLA_FLAGS JAX_PLATFORMS NCCL_DEBUG
    TOKENIZERS_PARALLELISM HF_HOME
"""


def test_a_worker_gets_no_secret_and_all_else():
    environment = dict.fromkeys([*SECRETS.split(), *NEEDED.split()], "x")
    assert sorted(of_worker(environment)) == sorted(NEEDED.split())


def test_foreign_code_gets_what_python_needs():
    environment = dict.fromkeys([*SECRETS.split(), *NEEDED.split()], "x")
    given = {name for name, value in of_foreign_code(environment).items() if value == "x"}
    assert given == {"PATH", "LD_LIBRARY_PATH"}
