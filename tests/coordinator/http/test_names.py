"""Names are data: what puts one into an address, a header, a folder or a file names exactly that thing."""

import ast
import asyncio
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tinker._client import AsyncTinker
from tinker._models import FinalRequestOptions

import spmd_tx
from spmd_tx.cli import checkpoints, runs
from spmd_tx.cli.server import Server
from spmd_tx.coordinator.checkpoints.remote_files import RemoteFiles
from spmd_tx.coordinator.http.security.signed_urls import SignedUrls
from spmd_tx.coordinator.http.services import Services
from spmd_tx.coordinator.storage.sqlite import damaged
from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath, check_name, check_new_name
from spmd_tx.errors import InvalidRequest
from spmd_tx.processes.private import warning_about
from tests.coordinator.conftest import BASE_MODEL, run_services, shared_app
from tests.coordinator.http.tinker.test_checkpoints import result

RUN = "s:train:0"
WEIGHTS = "training_runs/{0.run_id}/checkpoints/{0.kind}/{0.name}"
SIGNS = [*" .,;:@&=+$-_~!*'()[]{}<>|^`\"#?%/\\2\xe4\u6f22\u0301\u200b\n", "%20", "#2", "?a=b", "..", "/ttl"]
A_FEW, FEWER = (
    settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    for most in (30, 10)
)
signs = st.sampled_from(SIGNS)
texts = st.lists(signs | signs | st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).map(
    "".join
)


def taken(check: Callable[[str], None]) -> st.SearchStrategy[str]:
    def is_taken(name: str) -> bool:
        try:
            check(name)
        except InvalidRequest:
            return False
        return True

    return texts.filter(is_taken)


new_names = taken(check_new_name)
old_names = taken(lambda name: check_name("a checkpoint", name))


class Site:
    """The routes of a server of this process, and a model on it, for tests that are no coroutines."""

    def __init__(self, data_dir: Path) -> None:
        self._loop, self._stack = asyncio.Runner(), AsyncExitStack()
        self._sdk = AsyncTinker(api_key="tml-x", base_url="http://server")
        self.seq_ids = itertools.count(1)
        self.services, self.api = self._loop.run(self._open(data_dir))
        session = self.post("create_session", {"tags": [], "sdk_version": "0"})["session_id"]
        lora = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": BASE_MODEL,
            "lora_config": {"rank": 8},
        }
        self.model_id: str = self.post("create_model", lora)["model_id"]

    async def _open(self, data_dir: Path) -> tuple[Services, httpx.AsyncClient]:
        services = await self._stack.enter_async_context(run_services(data_dir))
        app = shared_app()
        app.state.services = services
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server/api/v1/")
        return services, await self._stack.enter_async_context(client)

    def close(self) -> None:
        self._loop.run(self._stack.aclose())
        self._loop.close()

    def post(self, route: str, body: object) -> Any:
        return self._loop.run(self.api.post(route, json=body)).raise_for_status().json()

    def get(self, url: str) -> httpx.Response:
        return self._loop.run(self.api.get(url))

    def save(self, path: CheckpointPath) -> dict[str, Any]:
        route = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}.get(path.kind)
        body = {"model_id": path.run_id, "path": path.name, "seq_id": next(self.seq_ids)}
        return self._loop.run(result(self.api, route or "save_weights_external", body))

    def by_sdk(self, method: str, path: str, then: str = "", body: object = None) -> httpx.Response:
        """Ask as the SDK does, which puts the parts of a tinker:// path into an address as they are."""
        run, checkpoint = path.removeprefix("tinker://").split("/", 1)
        url = f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}{then}"
        return self._loop.run(self.api.send(self._sdk._build_request(_options(method, url, body))))

    def names(self, kind: str = "weights") -> set[str]:
        listed = self.get(f"training_runs/{self.model_id}/checkpoints").json()["checkpoints"]
        return {
            each["checkpoint_id"].partition("/")[2]
            for each in listed
            if each["checkpoint_id"].startswith(kind)
        }

    def public(self) -> set[str]:
        listed = self.get(f"training_runs/{self.model_id}/checkpoints").json()["checkpoints"]
        return {each["checkpoint_id"].partition("/")[2] for each in listed if each["public"]}

    def clear(self) -> None:
        for name in self.names():
            url = f"training_runs/{self.model_id}/checkpoints/weights/{quote(name, safe='')}"
            self._loop.run(self.api.delete(url)).raise_for_status()


def _options(method: str, url: str, body: object) -> FinalRequestOptions:
    return FinalRequestOptions.construct(method=method, url=url, json_data=body)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.close()


# --- every place where a name is written ------------------------------------------------------------

Place = Callable[[str, Site, Path], str]  # writes a name, and reads what is named there


def in_an_address_of_the_sdk(name: str, site: Site, _: Path) -> str:
    url = f"/api/v1/training_runs/{RUN}/checkpoints/weights/{name}/ttl"
    raw = site._sdk._build_request(_options("put", url, None)).url.raw_path
    assert raw.count(b"/") == 8
    return unquote(raw.decode()).split("/")[7]


def in_a_quoted_path(name: str, site: Site, folder: Path) -> str:
    path = checkpoint_paths.quoted(CheckpointPath(RUN, "weights", name))
    return in_an_address_of_the_sdk(path.rpartition("/")[2], site, folder)


def in_a_path(name: str, *_: object) -> str:
    return checkpoint_paths.parse(str(CheckpointPath(RUN, "weights", name))).name


def in_a_signed_link(name: str, *_: object) -> str:
    urls = SignedUrls(b"secret")
    link = urlsplit(urls.sign("http://server/prefix/", f"/files/{name}", name, name))
    assert not link.fragment
    caller = urls.caller(unquote(link.path).removeprefix("/prefix"), dict(parse_qsl(link.query)))
    assert (caller.owner, caller.key_id) == (name, name)
    return unquote(link.path).removeprefix("/prefix/files/")


def in_a_link_to_the_page_of_a_run(name: str, site: Site, _: Path) -> str:
    place = urlsplit(site.get(f"http://server/training_runs/{quote(name, safe='')}").headers["location"])
    assert not place.query + place.fragment
    return unquote(place.path).removeprefix("/console/runs/")


def in_a_link_to_the_playground(name: str, site: Site, _: Path) -> str:
    place = site.get(f"http://server/playground?checkpoint={quote(name, safe='')}").headers["location"]
    return dict(parse_qsl(urlsplit(place).query))["model"]


def in_the_name_of_an_archive(name: str, site: Site, _: Path) -> str:
    path = CheckpointPath(site.model_id, "external_weights", name)
    if name not in site.names("external_weights"):
        assert "error" not in site.save(path)
    link = site.get(f"training_runs/{path.run_id}/checkpoints/{path.kind}/{quote(name, safe='')}/archive")
    answer = site.get(link.headers["location"])
    assert answer.status_code == 200
    message = EmailMessage()
    message["Content-Disposition"] = answer.headers["content-disposition"]
    return str(message.get_filename()).removesuffix(".tar")


def in_a_folder(name: str, _: Site, folder: Path) -> str:
    path = CheckpointPath(RUN, "weights", name).folder(folder)
    path.mkdir(parents=True, exist_ok=True)
    (found,) = (each for each in path.parent.iterdir() if each.samefile(path))
    return found.name


def in_a_store(name: str, _: Site, folder: Path) -> str:
    store = RemoteFiles((folder / "store").as_uri())
    for each in (name, f"{name}2", f"{name}2/{name}"):
        store.write(f"{each}/file", b"")
    (found,) = store.sizes(name)
    return found.removesuffix("/file")


def in_an_address_of_the_command_line(name: str, *_: object) -> str:
    asked = []

    def send(_: Server, address: str, *__: Any) -> bytes:
        asked.append(urlsplit(address))
        answer = {"runs": [{"id": name}], "next_cursor": None, "points": [], "next_after": None}
        return json.dumps(answer).encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "send", send)
        runs.show(name, None, True, "http://server", "")
    search, address = asked
    assert parse_qs(search.query) == {"limit": ["2"], "beginning": [name]}
    assert (address.query, address.fragment) == ("logged_after=-1&after=-1", "")
    return unquote(address.path).removeprefix("/api/v1/training_runs/").removesuffix("/metrics")


def in_the_address_of_a_mark(name: str, *_: object) -> str:
    asked = []

    def send(_: Server, address: str, *__: Any) -> bytes:
        asked.append(urlsplit(address))
        return b"{}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "send", send)
        checkpoints.mark(f"tinker://a:train:0/weights/{name}", False, "http://server", "")
    (address,) = asked
    assert (address.query, address.fragment) == ("", "")
    return (
        unquote(address.path)
        .removeprefix("/api/v1/training_runs/a:train:0/checkpoints/weights/")
        .removesuffix("/best")
    )


def in_the_advice_on_a_damaged_database(name: str, *_: object) -> str:
    command = str(damaged(name, "?")).rpartition("; ")[2].removesuffix(" shows what can still be read")
    program, file, option = shlex.split(command)
    assert (program, option) == ("sqlite3", ".recover")
    return file


def in_the_advice_on_an_open_folder(name: str, _: Site, folder: Path) -> str:
    place = folder / name
    place.mkdir(mode=0o755, exist_ok=True)
    place.chmod(0o755)
    advice = str(warning_about(place)).rpartition("with: ")[2]
    program, *options, path = shlex.split(advice)
    assert (program, options) == ("chmod", ["-R", "go="])
    return Path(path).name


# A place with the module that writes it, if that module quotes names itself.
PLACES: dict[Place, str | None] = {
    in_a_path: None,
    in_a_folder: None,
    in_a_store: None,
    in_an_address_of_the_sdk: None,
    in_a_quoted_path: "coordinator/wire/checkpoint_paths.py",
    in_a_signed_link: "coordinator/http/security/signed_urls.py",
    in_a_link_to_the_page_of_a_run: "coordinator/http/console/sdk_links.py",
    in_a_link_to_the_playground: "coordinator/http/console/sdk_links.py",
    in_the_name_of_an_archive: "coordinator/http/tinker/downloads.py",
    in_an_address_of_the_command_line: "cli/runs.py",
    in_the_address_of_a_mark: "cli/checkpoints.py",
    in_the_advice_on_a_damaged_database: "coordinator/storage/sqlite.py",
    in_the_advice_on_an_open_folder: "processes/private.py",
}
# They write tinker:// paths, which are no URLs; addresses of hosts with ports; sentences; or IDs that the
# server makes, into paths that others quote; or numbers of processes into paths of Linux.
OTHERS = {
    "cli/main.py",
    "cli/server.py",
    "cli/train.py",
    "cli/watch.py",
    "coordinator/agent/agent.py",
    "coordinator/agent/link.py",
    "coordinator/http/console/pages.py",
    "coordinator/http/console/timeline.py",
    "coordinator/http/addresses.py",
    "coordinator/http/tinker/sessions.py",
    "coordinator/mesh/port.py",
    "coordinator/requests/runs/sample_log.py",
    "coordinator/storage/tables.py",
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_name_stays_what_it_was(place, site, tmp_path, capsys):
    @A_FEW
    @given(new_names)
    @example("x" * 200)
    @example("\u6f22" * 66)
    @example("a+b&c;d=e (1)~'\"<>|{!a}$HOME`")
    def check(name: str) -> None:
        assert place(name, site, tmp_path) == name

    check()


def test_every_module_that_fills_in_addresses_has_a_place_here():
    """A new one quotes what it fills in, and gets a place, or it is listed with those that need not."""
    root = Path(spmd_tx.__file__).parent
    sources = {file.relative_to(root).as_posix(): file.read_text() for file in root.rglob("*.py")}
    found = {
        file
        for file, source in sources.items()
        if MAYBE.search(source)  # to parse them all takes seconds
        for node in ast.walk(ast.parse(source))
        if is_quoting(node) or is_filled_address(node)
    }
    assert found == {module for module in PLACES.values() if module} | OTHERS


QUOTING = {"quote", "quote_plus", "urlencode"}
ADDRESS = r"/\w|\?\w+=|[a-z]+://"
MAYBE = re.compile(rf"""["'](?:{ADDRESS})|\b(?:{"|".join(QUOTING)})\b""")


def is_quoting(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and not QUOTING.isdisjoint(each.name for each in node.names)


def is_filled_address(node: ast.AST) -> bool:
    """Whether this is an f-string of an address: a path, the part of one behind a question mark, or a URL."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) else None
    text = first.value if isinstance(first, ast.Constant) else ""
    return re.match(ADDRESS, str(text)) is not None


# --- the routes of checkpoints ----------------------------------------------------------------------


def test_each_route_of_a_checkpoint_acts_on_that_one_alone(site):
    @FEWER
    @given(new_names)
    @example("lr=1e-4 (final)")
    @example("a+b&c;d@e:f,g~h'i!$")
    def check(name: str) -> None:
        neighbours = {f"{name}2", f"x{name}", name.swapcase() + "_"}
        paths = {each: CheckpointPath(site.model_id, "weights", each) for each in (name, *neighbours)}
        for path in paths.values():
            assert site.save(path)["path"] == str(path)
        ours = str(paths[name])
        for method, then, body, public in (
            ("post", "/publish", None, {name}),
            ("put", "/ttl", {"ttl_seconds": 3600}, {name}),
            ("delete", "/publish", None, set()),
        ):
            site.by_sdk(method, ours, then, body).raise_for_status()
            assert site.public() == public
        assert site.post("weights_info", {"tinker_path": ours})["lora_rank"] == 8
        link = site.by_sdk("get", ours, "/archive").headers["location"]
        assert site.get(link).status_code == 200
        site.by_sdk("delete", ours).raise_for_status()
        assert site.names() == neighbours
        site.clear()

    check()


@pytest.fixture
def old(site, monkeypatch):
    """A way to store checkpoints as earlier versions did."""

    def old(*names: str) -> dict[str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_paths, "check_new_name", lambda _: None)
            return {name: site.save(CheckpointPath(site.model_id, "weights", name))["path"] for name in names}

    yield old
    site.clear()


TWINS = [("final", "final#2"), ("best", "best?acc=0.9"), ("c", "c#d?e%20"), ("a b", "a%20b")]
# Of a name with # or ? the SDK sends nothing that comes behind: to unpublish it is to delete another.
ASKED = [(*twins, "delete", then) for twins in TWINS for then in ("", "/publish")]
ASKED += [(*TWINS[-1], "post", "/publish"), (*TWINS[-1], "get", "/archive")]


@pytest.mark.parametrize("kept, odd, method, then", ASKED)
def test_the_sdk_is_refused_what_it_may_not_mean(site, old, kept, odd, method, then):
    paths = old(kept, odd)
    for path in paths.values():  # the SDK asks the same for both
        answer = site.by_sdk(method, path, then)
        assert answer.status_code == 400
        assert repr(odd) in answer.json()["detail"]
    assert (site.names(), site.public()) == ({kept, odd}, set())
    advised = answer.json()["detail"].rpartition(", as ")[2]
    site.by_sdk("delete", advised).raise_for_status()
    assert site.names() == {kept}
    site.by_sdk(method, paths[kept], then)
    assert site.names() == (set() if not then else {kept})


def test_who_quotes_names_is_not_refused(site, old):
    old("final", "final#2", "final%232")
    for name in ("final", "final%232", "final#2"):
        before = site.names()
        url = WEIGHTS.format(CheckpointPath(site.model_id, "weights", quote(name, safe="")))
        site._loop.run(site.api.delete(url)).raise_for_status()
        assert before - site.names() == {name}


def test_names_of_earlier_versions_are_addressed_when_they_are_quoted(site, old):
    @FEWER
    @given(old_names)
    @example("a%2520b")
    @example("#")
    def check(name: str) -> None:
        path = old(name)[name]
        assert site.post("weights_info", {"tinker_path": path})["lora_rank"] == 8
        site.by_sdk("delete", checkpoint_paths.quoted(checkpoint_paths.parse(path))).raise_for_status()
        assert site.names() == set()

    check()
