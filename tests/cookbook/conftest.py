from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from spmd_tx.demo.run import ServerLog, serving
from tests.cookbook.cookbook import ENVIRONMENT, Cookbook, Row, Served, offline_environment

HERE = Path(__file__).parent
REPORT = HERE.parents[1] / "runs" / "cookbook.md"
SERVER_OPTIONS = {
    "SPMD_TX_MAX_CONTEXT_LENGTH": "512",  # of rows of training, too: attention over long ones is slow on CPUs
    "SPMD_TX_MAX_LORA_ADAPTERS": "32",  # most recipes leave it to the server to end their sessions
}
ROWS = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of docs/cookbook.md, of this run."""
    rows = config.stash[ROWS]
    if rows:
        REPORT.parent.mkdir(exist_ok=True)
        lines = ["| recipe and arguments | what it gave | seconds |", "|---|---|---:|"]
        lines += [f"| `{row.command}` | {row.gave} | {row.seconds:.0f} |" for row in rows]
        REPORT.write_text("\n".join(lines) + "\n")
        terminalreporter.write_line(f"\n{len(rows)} runs of recipes; the table is in {REPORT}")


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    hub = ENVIRONMENT / "hub"
    assert hub.exists(), f"{hub} is not there; `make cookbook` writes it"
    return offline_environment(hub)


@pytest.fixture(scope="session")
def server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serves a model for which the cookbook picks a renderer that stops at a token."""
    with served("Qwen/Qwen3-8B", tmp_path_factory.mktemp("server"), environment) as server:
        yield server


@pytest.fixture(scope="session")
def base_server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same model under a name for which the cookbook picks a renderer that stops at a text."""
    with served("Qwen/Qwen3-8B-Base", tmp_path_factory.mktemp("base-server"), environment) as server:
        yield server


@contextmanager
def served(model: str, folder: Path, environment: dict[str, str], name: str = "") -> Iterator[Served]:
    """Serve a model, whose ``name`` recipes use; "" is what ``model`` says."""
    log = ServerLog(folder / "server.log")
    with serving(model, log, Console(), environment | SERVER_OPTIONS) as url:
        yield Served(url, name or model, log)


@pytest.fixture
def cookbook(
    server: Served, environment: dict[str, str], tmp_path: Path, pytestconfig: pytest.Config
) -> Iterator[Cookbook]:
    """The recipes, against a server that must not complain of them."""
    yield from uncomplaining(server, environment, tmp_path, pytestconfig)


@pytest.fixture
def base_cookbook(
    base_server: Served, environment: dict[str, str], tmp_path: Path, pytestconfig: pytest.Config
) -> Iterator[Cookbook]:
    yield from uncomplaining(base_server, environment, tmp_path, pytestconfig)


def uncomplaining(
    server: Served, environment: dict[str, str], folder: Path, config: pytest.Config
) -> Iterator[Cookbook]:
    before = len(server.complaints())
    yield Cookbook(server, environment | {"TINKER_BASE_URL": server.url}, folder, config.stash[ROWS])
    assert server.complaints()[before:] == []
