"""A Hugging Face Hub on loopback that takes one repository's files, for `tinker checkpoint push-hf`."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Knows one user, whose repositories are empty; remembers what is committed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: list[str] = []
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path == "/api/whoami-v2":
            self._answer({"type": "user", "name": "somebody", "auth": {"type": "access_token"}})
        elif "/revision/" in self.path or self.path.startswith("/api/models/"):
            self._answer({"id": self.server.repositories[-1], "sha": "0" * 40, "siblings": []})
        else:
            self._answer({"error": "Entry not found"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/api/repos/create":
            self.server.repositories.append(json.loads(body)["name"])
            self._answer({"url": f"{self.server.url}/somebody/{self.server.repositories[-1]}"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.url}/somebody/{self.server.repositories[-1]}/commit/1"
            self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": url})
        else:
            self._answer({"error": f"this hub has no {self.path}"}, 404)

    def _answer(self, value: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        if status == 404:
            self.send_header("x-error-code", "EntryNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: tests look at what came."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
