"""Imitates as much of huggingface.co as an upload of a folder needs; it keeps what is committed."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub:
    """Serves a hub on loopback."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}  # by repository
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator["FakeHub"]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        match method, path.strip("/").split("/"):
            case "GET", ["api", "whoami-v2"]:
                return 200, {"type": "user", "name": "alice", "auth": {"accessToken": {"role": "write"}}}
            case "POST", ["api", "repos", "create"]:
                name = f"alice/{json.loads(body)['name']}"
                self.files.setdefault(name, {})
                return 200, {"url": f"{self.url}/{name}", "name": name}
            case "POST", ["api", "models", owner, name, "preupload", _]:
                paths = [file["path"] for file in json.loads(body)["files"]]
                each = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                return 200, {"files": [{"path": path, **each} for path in paths]}
            case "POST", ["api", "models", owner, name, "commit", _]:
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        content = base64.b64decode(entry["value"]["content"])
                        self.files[f"{owner}/{name}"][entry["value"]["path"]] = content
                url = f"{self.url}/{owner}/{name}/commit/{'0' * 40}"
                return 200, {"success": True, "commitUrl": url, "commitOid": "0" * 40}
            case "POST", ["api", "validate-yaml"]:
                return 200, {"errors": [], "warnings": []}
        return 404, {"error": f"no {method} {path}"}


def _handler_of(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, content = hub.answer(self.command, self.path.partition("?")[0], body)
            sent = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(sent)

        do_GET = do_POST = do_HEAD = do_PUT = _answer

        def log_message(self, *_: object) -> None:
            pass

    return Handler
