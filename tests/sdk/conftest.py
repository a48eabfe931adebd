import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default as transports
import pytest
import tinker

from spmd_tx.coordinator.text.chat_template import TEMPLATE
from spmd_tx.demo import tiny_model
from tests.sdk import server as servers
from tests.sdk.examples import CONTEXT, SECONDS, VOCABULARY
from tests.sdk.raw_api import RawApi
from tests.sdk.server import BASE_MODEL, COMMAND, QUICKLY, Server, serving
from tests.support.chat_templates import QWEN3
from tests.support.distribution import GROUP_OF, file_of
from tests.support.otel_collector import Collector, collecting

HERE = Path(__file__).parent
SPEC = tiny_model.Spec(n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, max_positions=CONTEXT)
SLOTS = 8

NewTrainer = Callable[..., tinker.TrainingClient]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK leaves a socket of each handshake to the garbage collector."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
            if _uses_the_shared_server(item) and GROUP_OF.get(file_of(item.nodeid)) != "server":
                where = "tests/support/distribution.py"
                raise pytest.UsageError(f"{item.nodeid} uses the shared server: name its file in {where}")


def _uses_the_shared_server(item: pytest.Item) -> bool:
    """Whether a test of the default suite does, which would start another one in each process."""
    definitions = item._fixtureinfo.name2fixturedefs.get("server", ())  # pyright: ignore[reportAttributeAccessIssue]
    is_shared = any(definition.scope == "session" for definition in definitions[-1:])
    return is_shared and item.get_closest_marker("slow") is None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """What a server has to say belongs to the report of a test that it failed."""
    report = yield
    if report.failed:
        for server in servers.running:
            report.sections.append((f"log of {server.url}", server.log[-10_000:]))
        servers.forget_closed()
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End a shared server behind the last of its tests: one that has nothing to do takes time, too."""
    group = GROUP_OF.get(file_of(item.nodeid))
    if group in servers.of_groups and (nextitem is None or GROUP_OF.get(file_of(nextitem.nodeid)) != group):
        servers.of_groups.pop(group).close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template for agents, as published models have it."""
    directory = tiny_model.write(tmp_path_factory.mktemp("model"), SPEC)
    (directory / TEMPLATE).write_text(QWEN3)
    return directory


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the server sends spans of the requests whose clients want that."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def server(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Server]:
    data_dir = tmp_path_factory.mktemp("shared") / "data"
    traces = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.endpoint}/v1/traces",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_BSP_SCHEDULE_DELAY": "100",  # ms
    }
    options = {"command": [str(COMMAND)], "environment": QUICKLY | traces, "max_lora_adapters": SLOTS}
    with serving(model_dir, data_dir, **options) as server:
        servers.of_groups["server"] = server
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Each client of the SDK reads all certificates of this machine, though no server here has any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="module", autouse=True)
def sockets_are_collected() -> Iterator[None]:
    """Here, and not in the middle of somebody else's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def live_server(server: Server) -> Server:
    """Without a server, the SDK would try again for minutes, in every test."""
    assert server.process.poll() is None, f"the shared server has ended\n{server.log[-10_000:]}"
    return server


@pytest.fixture
def service(live_server: Server) -> Iterator[tinker.ServiceClient]:
    """A tenant; what it has on the server is freed when the test ends."""
    client = tinker.ServiceClient(base_url=live_server.url, api_key="tml-test")
    yield client
    client.close("success").result(SECONDS)


@pytest.fixture
def other_service(live_server: Server) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=live_server.url, api_key="tml-other")
    yield client
    client.close("success").result(SECONDS)


@pytest.fixture(scope="session")  # a second one would be the first, closed
def rest(server: Server) -> Iterator[tinker.RestClient]:
    client = tinker.RestClient(base_url=server.url, api_key="tml-test")
    yield client
    client.holder.close()


@pytest.fixture
def api(live_server: Server) -> Iterator[RawApi]:
    api = RawApi(live_server.url, BASE_MODEL)
    yield api
    api.close()


@pytest.fixture
def new_trainer(service: tinker.ServiceClient) -> NewTrainer:
    """Models that are told the same start the same."""

    def new_trainer(rank: int = 8, seed: int = 1, **more: Any) -> tinker.TrainingClient:
        return service.create_lora_training_client(BASE_MODEL, rank=rank, seed=seed, **more).result(SECONDS)

    return new_trainer


@pytest.fixture
def trainer(new_trainer: NewTrainer) -> tinker.TrainingClient:
    return new_trainer()


@pytest.fixture
def base_sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
