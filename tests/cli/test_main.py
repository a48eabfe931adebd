import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.cli import main as cli
from spmd_tx.config import OPTIONS, ServerConfig
from spmd_tx.coordinator import server as server_package
from spmd_tx.coordinator.agent import main
from spmd_tx.coordinator.agent.agent import AgentOptions
from spmd_tx.coordinator.retention import reaper
from spmd_tx.coordinator.retention.reaper import Reaper
from spmd_tx.errors import StartError
from spmd_tx.protocol.agents import ANY_PROCESS
from tests.support.databases import make_database


class FakeServer:
    """Stands in for the coordinator's server module: remembers the configuration and ends at once."""

    def __init__(self, outcome: int | StartError = 0):
        self.outcome = outcome
        self.config: ServerConfig | None = None

    async def serve(self, config: ServerConfig) -> int:
        self.config = config
        if isinstance(self.outcome, StartError):
            raise self.outcome
        return self.outcome


@pytest.fixture
def server(monkeypatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(server_package, "serve", server, raising=False)
    return server


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["spmd-tx", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=exit_.value.code or 0, out=printed.out, err=printed.err)

    return run


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "server.toml"
    path.write_text(text)
    return str(path)


def test_the_options_users_know_reach_the_server(run, server):
    arguments = "--base-model Qwen/Qwen3-4B --tensor-parallel-size 8 --max-lora-adapters 3 --max-lora-rank 16"
    assert run("serve", *arguments.split()).code == 0
    assert server.config == ServerConfig(
        base_model="Qwen/Qwen3-4B", tensor_parallel_size=8, max_lora_adapters=3, max_lora_rank=16
    )


def test_without_options_the_defaults_are_those_of_the_config(run, server):
    run("serve", "--base-model", "m")
    assert server.config == ServerConfig(base_model="m")


@pytest.mark.parametrize(
    "toml_port, variable, argument, expected",
    [
        (None, None, None, 8000),
        (8001, None, None, 8001),
        (8001, "8002", None, 8002),
        (8001, "8002", "8003", 8003),
    ],
    ids=["default", "toml", "environment", "command line"],
)
def test_the_nearer_source_of_an_option_wins(
    run, server, tmp_path, monkeypatch, toml_port, variable, argument, expected
):
    if variable:
        monkeypatch.setenv("SPMD_TX_PORT", variable)
    file = toml(tmp_path, "base_model = 'm'\n" + (f"port = {toml_port}" if toml_port else ""))
    run("serve", "--config", file, *(["--port", argument] if argument else []))
    assert server.config.port == expected


def test_every_option_has_help_an_environment_variable_and_a_toml_key(run, server, tmp_path, monkeypatch):
    more = ["bounds", "group", "groups", "processes_beside"]
    assert sorted([*OPTIONS, *more]) == sorted(ServerConfig.__struct_fields__)
    shown = run("serve", "--help").out
    for name in OPTIONS:
        assert f"--{name.replace('_', '-')} " in shown

    values = {
        "base_model": "m", "served_model_name": "n", "dtype": "float32", "max_context_length": 64,
        "fully_sharded_data_parallel_size": 2, "expert_parallel_size": 3, "tensor_parallel_size": 4,
        "num_processes": 5, "max_lora_adapters": 6, "max_lora_rank": 7, "host": "::1", "port": 9,
        "data_dir": "d", "database_url": "sqlite+aiosqlite://", "session_timeout": 10.5, "train_tokens": 11,
        "sampler_slots": 12, "decode_rows": 13, "decode_steps": 14, "page_size": 15, "kv_cache_tokens": 16,
        "min_free_disk": "5%", "keep_results_hours": 17.5, "keep_versions_hours": 18.5,
        "max_compilation_cache": "1GiB", "insecure_no_auth": True,
    }  # fmt: skip
    expected = ServerConfig(**{**values, "data_dir": Path("d")})
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    run("serve", "--config", toml(tmp_path, "\n".join(lines)))
    assert server.config == expected
    for name, value in values.items():
        monkeypatch.setenv(f"SPMD_TX_{name.upper()}", str(value))
    run("serve")
    assert server.config == expected


@pytest.mark.parametrize(
    "name, meant",
    [
        ("SPMD_TX_MAX_LORA_ADAPTER", "; perhaps SPMD_TX_MAX_LORA_ADAPTERS is meant"),
        ("SPMD_TX_DATADIR", "; perhaps SPMD_TX_DATA_DIR is meant"),
        ("SPMD_TX_SERVICE_HOST", "enableServiceLinks is false"),
    ],
)
def test_a_variable_of_no_option_is_refused_by_every_command(run, monkeypatch, name, meant):
    monkeypatch.setenv(name, "1")
    for command in (["serve", "--base-model", "m"], ["keys", "list"]):
        refused = run(*command)
        assert refused.code == 2
        assert f"{name} is set in the environment, and no option has that variable" in refused.err
        assert meant in refused.err


def test_the_variables_of_all_commands_are_known(run, server, monkeypatch):
    for name, value in {"SECRET": "s", "COORDINATOR": "h:1", "PROCESS_ID": "1", "SECRET_FILE": "f"}.items():
        monkeypatch.setenv(f"SPMD_TX_{name}", value)
    run("serve", "--base-model", "m")
    assert server.config.base_model == "m"


def test_the_config_file_can_be_named_by_the_environment(run, server, tmp_path, monkeypatch):
    monkeypatch.setenv("SPMD_TX_CONFIG", toml(tmp_path, "base_model = 'from the file'"))
    run("serve")
    assert server.config.base_model == "from the file"


def test_groups_of_the_file_come_before_those_of_the_command_line(run, server, tmp_path):
    file = toml(
        tmp_path,
        """
        base_model = "m"
        [[groups]]
        name = "teacher"
        base_model = "t"
        tensor_parallel_size = 2
        full_parameters = true
        """,
    )
    assert run("serve", "--config", file, "--group", "name=judge,base_model=j").code == 0
    teacher, judge = server.config.groups
    assert (teacher.group, teacher.tensor_parallel_size, teacher.full_parameters) == ("teacher", 2, True)
    assert (judge.group, judge.base_model) == ("judge", "j")


@pytest.mark.parametrize("text", ["groups = 3", "groups = ['name=t']", "[groups]\nname = 't'"])
def test_groups_of_the_file_are_a_list_of_tables(run, server, tmp_path, text):
    result = run("serve", "--config", toml(tmp_path, f"base_model = 'm'\n{text}"))
    assert result.code == 2
    assert "write each group below a line [[groups]]" in result.err


def test_bounds_come_from_all_sources_and_of_each_the_nearest_counts(run, server, tmp_path, monkeypatch):
    file = toml(tmp_path, "base_model = 'm'\n[limits]\nstop_strings = 1\nstop_string_bytes = '1KiB'")
    run("serve", "--config", file)
    assert server.config.bounds == Bounds(stop_strings=1, stop_string_bytes=1024)
    monkeypatch.setenv("SPMD_TX_LIMIT", "stop_strings=2, stop_string_bytes=2KiB")
    run("serve", "--config", file)
    assert server.config.bounds == Bounds(stop_strings=2, stop_string_bytes=2048)
    run("serve", "--config", file, "--limit", "stop_strings=3")
    assert server.config.bounds == Bounds(stop_strings=3, stop_string_bytes=2048)
    run("serve", "--config", file, "--limit", "stop_strings=3", "--limit", "stop_string_bytes=4")
    assert server.config.bounds == Bounds(stop_strings=3, stop_string_bytes=4)


@pytest.mark.parametrize(
    "pair, complaint",
    [("stop_strings", "has no value; write it as NAME=VALUE"), ("stop_string=1", "did you mean stop_string")],
)
def test_a_bound_that_cannot_be_is_one_line(run, server, pair, complaint):
    result = run("serve", "--base-model", "m", "--limit", pair)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert complaint in result.err
    assert server.config is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("limits = 3", "make it a table, [limits]"),
        ("base_modle = 'm'", "sets base_modle; valid keys are base_model, revision, served_model_name,"),
        ("[model]\nbase_model = 'm'", "sets model; valid keys are"),
        ("base_model =", "is not valid TOML"),
        ("a = " + "[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_bad_config_file_is_named_with_its_fault(run, server, tmp_path, text, message):
    result = run("serve", "--config", toml(tmp_path, text))
    assert result.code == 2
    assert "server.toml" in result.err
    assert message in result.err
    assert server.config is None


def test_a_missing_config_file_is_one_line(run, tmp_path):
    result = run("serve", "--config", str(tmp_path / "none.toml"))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "none.toml: No such file or directory" in result.err


def test_a_missing_base_model_is_asked_for_by_name(run):
    result = run("serve")
    assert result.code == 2
    assert "--base-model" in result.err


@pytest.mark.parametrize("source", ["command line", "toml"])
def test_a_value_of_the_wrong_type_names_the_option(run, server, tmp_path, source):
    arguments = (
        ["--port", "many"] if source == "command line" else ["--config", toml(tmp_path, "port = 'many'")]
    )
    result = run("serve", "--base-model", "m", *arguments)
    assert result.code == 2
    assert "Invalid value for '--port'" in result.err
    assert server.config is None


def test_a_value_out_of_range_is_one_line(run, server):
    result = run("serve", "--base-model", "m", "--max-lora-rank", "0")
    assert (result.code, result.err) == (2, "spmd-tx: --max-lora-rank is 0; it must be at least 1\n")


def test_what_the_operator_can_fix_is_one_line_without_a_traceback(run, server):
    server.outcome = StartError("port 8000 is in use; choose another with --port")
    result = run("serve", "--base-model", "m")
    assert (result.code, result.err) == (2, "spmd-tx: port 8000 is in use; choose another with --port\n")


def test_the_exit_code_is_that_of_the_server(run, server):
    server.outcome = 3
    assert run("serve", "--base-model", "m").code == 3


def test_make_model_writes_a_checkpoint(run, tmp_path):
    assert run("make-model", str(tmp_path / "model")).code == 0
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_an_unknown_family_is_answered_with_the_known_ones(run, tmp_path):
    result = run("make-model", str(tmp_path), "--family", "bloom")
    assert result.code == 2
    assert result.err.startswith("spmd-tx: --family is 'bloom'; families: qwen3, qwen3_moe, llama, ")


def test_an_unknown_preset_is_answered_with_the_known_ones(run, tmp_path):
    result = run("make-model", str(tmp_path), "--preset", "huge")
    assert (result.code, result.err) == (
        2,
        "spmd-tx: --preset is 'huge'; presets: tiny, tiny-gqa, tiny-moe\n",
    )


def test_gc_tells_what_would_go_and_deletes_it(run, tmp_path):
    orphan = tmp_path / "scratch" / "file"
    orphan.parent.mkdir()
    make_database(tmp_path)
    orphan.write_text("x" * 2048)
    told = run("gc", "--dry-run", "--data-dir", str(tmp_path))
    assert (told.code, orphan.exists()) == (0, True)
    assert "old folders" in told.out
    assert "Nothing was deleted" in told.out
    assert "2.0 KiB" in run("gc", "--data-dir", str(tmp_path)).out
    assert not orphan.exists()


def test_gc_keeps_as_long_as_the_server_does(run, tmp_path, monkeypatch):
    used = []

    async def collect(data_dir, database_url, config, dry_run):
        used.append(Reaper(None, data_dir, config))
        return []

    monkeypatch.setattr(reaper, "collect", collect)
    monkeypatch.setenv("SPMD_TX_KEEP_AUDIT_DAYS", "365")
    options = ("--keep-metrics-days", "400", "--session-timeout", "36000")
    assert run("gc", "--data-dir", str(tmp_path), *options).code == 0
    (reaper_of_options,) = used
    config = reaper_of_options._config
    assert (config.keep_audit_days, config.keep_metrics_days) == (365, 400)
    assert reaper_of_options._ages(1e9).results == 1e9 - 36000


def test_backup_copies_a_data_directory(run, tmp_path):
    make_database(tmp_path)
    assert run("backup", str(tmp_path / "copy"), "--data-dir", str(tmp_path)).code == 0
    assert (tmp_path / "copy" / "spmd_tx.db").exists()
    assert run("backup", str(tmp_path / "copy"), "--data-dir", str(tmp_path)).code == 2


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_names_what_a_bug_report_needs(run, word):
    out = run(word).out
    assert all(word in out for word in ("spmd-tx 0.", "Python 3.", "JAX 0."))


@pytest.mark.parametrize("command", ["", "serve ", "keys create "])
def test_h_asks_for_help(run, command):
    assert run(*f"{command}-h".split()).out == run(*f"{command}--help".split()).out


def test_help_and_serve_start_without_the_heavy_packages():
    code = (
        "import sys, spmd_tx.cli.main; "
        "print(*{'jax', 'litestar', 'sqlalchemy', 'numpy', 'transformers', 'tinker'} & set(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == ""


@pytest.fixture
def agents(monkeypatch):
    """Record the options of agents instead of starting them."""
    started = []

    async def run(options, log_format):
        started.append(options)
        return 0

    monkeypatch.setattr(main, "run", run)
    return started


def test_a_worker_is_told_where_the_server_is_and_which_one_it_is(run, agents, tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    arguments = "worker --coordinator node-a:8470 --process-id 3 --devices 4 --base-model /models/m"
    assert run(*arguments.split(), "--secret-file", str(tmp_path / "secret")).code == 0
    assert agents == [
        AgentOptions(
            coordinator="node-a:8470",
            process=3,
            secret="0123456789abcdef",
            devices=4,
            base_model="/models/m",
            patience=600,
            leave_seconds=20,
        )
    ]


@pytest.mark.parametrize(("options", "process"), [(["--process-id", "0"], 0), ([], ANY_PROCESS)])
def test_a_worker_may_name_its_group_and_leave_its_number_to_the_server(
    run, agents, tmp_path, options, process
):
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    arguments = ["worker", "--coordinator", "node-a:8470", "--group", "teacher", *options]
    assert run(*arguments, "--secret-file", str(tmp_path / "secret")).code == 0
    assert [(each.group, each.process) for each in agents] == [("teacher", process)]


def test_a_worker_without_the_secret_is_told_how_to_get_it(run, agents):
    refused = run("worker", "--coordinator", "node-a:8470", "--process-id", "0")
    assert refused.code == 2
    assert "give both the same --secret-file, or SPMD_TX_SECRET in their environments" in refused.err
    assert agents == []


def test_the_secret_cannot_be_given_where_everybody_sees_it(run):
    for command in ("serve", "worker"):
        assert "--secret " not in run(command, "--help").out


def test_a_config_file_that_is_no_text_is_named(run, tmp_path):
    (tmp_path / "server.toml").write_bytes(b"base_model = '\xff'")
    result = run("serve", "--config", str(tmp_path / "server.toml"))
    assert result.code == 2
    assert "server.toml is not valid TOML" in result.err


LONG = "a" * 300  # longer than a name can be


@pytest.mark.parametrize("command", ["gc", "keys list", "requests list", "backup copy"])
@pytest.mark.parametrize("folder", [LONG, "empty", "typo"])
def test_commands_that_look_at_data_make_none(run, tmp_path, monkeypatch, command, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    result = run(*command.split(), "--data-dir", folder)
    assert result.code == 2
    assert folder in result.err
    assert "name" in result.err
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


@pytest.mark.parametrize("command", ["gc", "keys list", "requests list"])
def test_commands_that_look_at_a_database_by_url_make_none(run, tmp_path, command):
    result = run(
        *command.split(), "--data-dir", str(tmp_path), "--database-url", f"sqlite:///{tmp_path}/d/x.db"
    )
    assert (result.code, "there is no database" in result.err) == (2, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["file", "file/below", LONG])
@pytest.mark.parametrize("command", [["make-model"], ["demo", "--out"]])
def test_a_folder_that_cannot_be_made_is_named(run, tmp_path, monkeypatch, command, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    result = run(*command, place)
    assert result.code == 2
    assert place in result.err
    assert "name another folder" in result.err


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("version", ">&-"),
        ("version", ">/dev/full"),
        ("keys list", ">/dev/full"),
        ("requests list --json", ">&-"),
        pytest.param("keys list", ">&-", marks=pytest.mark.slow),
        pytest.param("requests list --json", ">/dev/full", marks=pytest.mark.slow),
    ],
)
def test_an_output_that_cannot_be_written_is_told_without_a_traceback(run, tmp_path, command, output):
    make_database(tmp_path)
    program = f"{sys.executable} -m spmd_tx.cli {command} {output}"
    environment = os.environ | {"SPMD_TX_DATA_DIR": str(tmp_path)}
    ended = subprocess.run(
        ["bash", "-c", program], env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    told = "spmd-tx: cannot write: No space left on device; make room, or send the output elsewhere\n"
    assert (ended.returncode, ended.stderr) == ((0, "") if output == ">&-" else (1, told))
