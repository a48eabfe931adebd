"""A stand-in of the Hugging Face Hub, for downloads of models: its routes for revisions and files."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants


@dataclass
class ModelHub:
    """Holds repositories: the directory of each commit, and branches and tags."""

    url: str = ""
    commits: dict[str, dict[str, Path]] = field(default_factory=dict)  # by repository
    refs: dict[str, dict[str, str]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str | None = None  # None: everybody is let in
    fetched: list[str] = field(default_factory=list)  # repository/file, each time that one is downloaded
    requests: int = 0
    goes_on: threading.Event = field(default_factory=threading.Event)  # weights stop halfway until then

    def __post_init__(self) -> None:
        self.goes_on.set()

    def push(self, name: str, directory: Path, *refs: str) -> str:
        """Make a commit of a directory, to which ``main`` and these names lead, and return it."""
        commit = hashlib.sha1(str(directory).encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = directory
        self.refs.setdefault(name, {}).update(dict.fromkeys((*refs, "main"), commit))
        return commit

    def files_of(self, name: str) -> list[str]:
        """The files that were downloaded, in their order."""
        return [each.removeprefix(f"{name}/") for each in self.fetched if each.startswith(f"{name}/")]


def lead_to(hub: ModelHub, patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let this process take the stand-in for the Hugging Face Hub, with a cache of its own and no token."""
    files = "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + files)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    patch.delenv("HF_TOKEN", raising=False)


class Refused(Exception):
    """Is answered with a status and the header by which the client knows why."""

    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


def _commit(hub: ModelHub, name: str, revision: str) -> tuple[str, Path]:
    if name not in hub.commits:
        raise Refused(401, "RepoNotFound")
    commit = hub.refs[name].get(revision, revision)
    if commit not in hub.commits[name]:
        raise Refused(404, "RevisionNotFound")
    return commit, hub.commits[name][commit]


def _files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def _answer(hub: ModelHub, path: str) -> tuple[Mapping[str, str], bytes]:
    """Return headers and body of what a path leads to. Raises Refused."""
    kind, *parts = path.strip("/").split("/")
    if kind == "api":
        name, (action, revision) = "/".join(parts[1:3]), (*parts[3:5], "revision", "main")[:2]
        commit, directory = _commit(hub, name, revision)
        files = _files(directory)
        content: Any = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
        if action == "tree":
            content = [
                {
                    "type": "file",
                    "path": file,
                    "size": (directory / file).stat().st_size,
                    "oid": _tag(directory / file),
                }
                for file in files
            ]
        return {}, json.dumps(content).encode()
    name, revision, file = "/".join([kind, parts[0]]), parts[2], "/".join(parts[3:])
    commit, directory = _commit(hub, name, revision)
    if name in hub.gated:
        raise Refused(403, "GatedRepo")
    if not (directory / file).is_file():
        raise Refused(404, "EntryNotFound")
    return {"ETag": f'"{_tag(directory / file)}"', "X-Repo-Commit": commit}, (directory / file).read_bytes()


def _tag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving(hub: ModelHub) -> Iterator[ModelHub]:
    """Serve the stand-in on a free port of loopback, at ``hub.url``."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def do_GET(self) -> None:
            self._reply(with_body=True)

        def _reply(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests += 1
            try:
                if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                    raise Refused(401, "")
                headers, body = _answer(hub, path)
            except Refused as refused:
                self.send_response(refused.status)
                if refused.code:
                    self.send_header("X-Error-Code", refused.code)
                self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if with_body and not path.startswith("/api/"):
                owner, model, _, _, *file = path.strip("/").split("/")
                hub.fetched.append("/".join([owner, model, *file]))
            self.send_response(200)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                half = len(body) // 2
                self.wfile.write(body[:half])
                if path.endswith(".safetensors"):
                    hub.goes_on.wait()
                self.wfile.write(body[half:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds until it notices its end
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
