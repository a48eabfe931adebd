import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx._transports.default as transports
import pyqwest
import pytest
import tinker

from tests.sdk import server as servers
from tests.sdk.examples import SECONDS
from tests.sdk.raw_api import RawApi
from tests.sdk.server import BASE_MODEL, Server
from tests.support.distribution import GROUP_OF, file_of

HERE = Path(__file__).parent

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
    """Whether a test does, which would start another one in each process, or come when it has ended."""
    definitions = item._fixtureinfo.name2fixturedefs.get("server", ())  # pyright: ignore[reportAttributeAccessIssue]
    return any(definition.scope == "session" for definition in definitions[-1:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """What a server has to say belongs to the report of a test that it failed."""
    report = yield
    if report.failed:
        for server in servers.running:
            report.sections.append((f"log of {server.url}", server.log[-10_000:]))
        servers.forget_closed()
    return report


@pytest.fixture(scope="session")
def model_dir(shared_model_dir: Path) -> Path:
    return shared_model_dir


@pytest.fixture(scope="session")
def server(shared_server: Server) -> Server:
    return shared_server


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Each client of the SDK reads all certificates of this machine several times; no server here has any."""
    new = pyqwest.HTTPTransport

    def without_certificates(**options: Any) -> pyqwest.HTTPTransport:
        options["tls_include_system_certs"] = False
        return new(**options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "create_ssl_context", functools.cache(httpx.create_ssl_context))
        patch.setattr(pyqwest, "HTTPTransport", without_certificates)
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
