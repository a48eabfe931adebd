"""The servers that many files share: each is started once, and ends behind the last of its tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_tx.coordinator.text.chat_template import TEMPLATE
from spmd_tx.demo import tiny_model
from tests.sdk import serve_with_held_program
from tests.sdk.server import BASE_MODEL, CONTEXT, QUICKLY, VOCABULARY, Server, serving
from tests.support.chat_templates import QWEN3
from tests.support.distribution import GROUP_OF, file_of
from tests.support.otel_collector import Collector, collecting

SPEC = tiny_model.Spec(n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, max_positions=CONTEXT)
SLOTS = 8
GROUP = "server"  # of tests/support/distribution.py

started: list[Server] = []


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End them when no more of their tests come: a server that has nothing to do takes time, too."""
    if started and (nextitem is None or GROUP_OF.get(file_of(nextitem.nodeid)) != GROUP):
        for server in started:
            server.close()
        started.clear()


@pytest.fixture(scope="session")
def shared_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template for agents, as published models have it."""
    directory = tiny_model.write(tmp_path_factory.mktemp("model") / BASE_MODEL, SPEC)
    (directory / TEMPLATE).write_text(QWEN3)
    return directory


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the server sends spans of the requests whose clients want that."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def shared_server(
    shared_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Server]:
    """Open to everybody, until tests/conformance makes keys."""
    data_dir = tmp_path_factory.mktemp("shared") / "data"
    traces = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.endpoint}/v1/traces",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_BSP_SCHEDULE_DELAY": "100",  # ms
    }
    held = {"HELD_PROGRAM": str(data_dir.with_name("held"))}
    options = {"environment": QUICKLY | traces | held, "max_lora_adapters": SLOTS}
    with serving(shared_model_dir, data_dir, run=serve_with_held_program.run, **options) as server:
        started.append(server)
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="session")
def seeing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of a model that takes images."""
    from tests.sdk import seeing  # which imports the SDK

    path = tmp_path_factory.mktemp("seeing")
    with serving(seeing.write_model(path / "model"), path / "data", **seeing.OPTIONS) as server:
        started.append(server)
        server.wait_until_ready()
        yield server
