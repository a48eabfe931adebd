"""A stand-in of the Hugging Face Hub: its HTTP routes by which repositories are made and filled."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LFS_SUFFIXES = (".safetensors", "tokenizer.json")


class Hub:
    """Holds repositories, by name, as their files; an upload appears with its commit."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.url = ""
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}  # of Git LFS, by their SHA-256
        self.sent: list[str] = []  # objects, each time that one arrives
        self.room = 1 << 30  # for so many objects
        self.refuses_commits = False

    def answer(self, path: str, body: bytes) -> Any:
        """Return what a POST gets, as JSON; None: 403."""
        kind, _, rest = path.removeprefix("/api/").partition("/")
        if path == "/api/repos/create":
            wish = json.loads(body)
            name = "/".join(filter(None, (wish.get("organization"), wish["name"])))
            self.private[name] = wish.get("private") or wish.get("visibility") == "private"
            self.files.setdefault(name, {})
            return {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.endswith(".git/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            return {"transfer": "basic", "objects": [each | self._upload(each["oid"]) for each in wanted]}
        name, _, action = rest.rpartition("/main")[0].rpartition("/")
        if kind == "models" and action == "preupload":
            modes = {True: "lfs", False: "regular"}
            paths = [each["path"] for each in json.loads(body)["files"]]
            return {
                "files": [
                    {"path": path, "uploadMode": modes[path.endswith(LFS_SUFFIXES)], "shouldIgnore": False}
                    for path in paths
                ]
            }
        if kind == "models" and action == "commit" and not self.refuses_commits:
            self._commit(name, [json.loads(line) for line in body.splitlines()])
            return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{name}/commit/0"}
        return None

    def _upload(self, oid: str) -> dict[str, Any]:
        """Say where to put an object; of one that is here, nothing."""
        return {} if oid in self.objects else {"actions": {"upload": {"href": f"{self.url}/lfs/{oid}"}}}

    def put(self, oid: str, content: bytes) -> bool:
        """Keep an object, if there is room."""
        if len(self.objects) >= self.room:
            return False
        self.objects[oid] = content
        self.sent.append(oid)
        return True

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "lfsFile":
                self.files[name][value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])


@contextmanager
def serving(hub: Hub) -> Iterator[None]:
    """Serve the stand-in on a free port of loopback, at ``hub.url``."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def reply(self, content: Any, status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def is_known(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {hub.token}"

        def do_GET(self) -> None:
            self.reply({"name": "alice", "type": "user"}, 200 if self.is_known() else 401)

        def do_POST(self) -> None:
            body = self.body()
            content = hub.answer(self.path, body) if self.is_known() else None
            self.reply(
                {"error": "you may not"} if content is None else content, 403 if content is None else 200
            )

        def do_PUT(self) -> None:
            is_kept = hub.put(self.path.rpartition("/")[2], self.body())
            self.reply({}, 200 if is_kept else 403)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds until it notices its end
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
