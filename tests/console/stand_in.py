"""Serves the built console with invented runs, by the routes under /console/api. Runs no coordinator."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.console import invented

STATIC = Path(__file__).parents[2] / "spmd_tx/coordinator/http/console/static"
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
KEY = "tml-known"


def answer(path: str, query: dict[str, str]) -> dict | None:
    listed = invented.runs()
    if path == "runs":
        return {"runs": listed, "next_cursor": None}
    match path.split("/"):
        case ["server"]:
            return invented.server()
        case ["keys"]:
            return invented.keys()
        case ["usage"]:
            return invented.use(int(query["hours"]))
        case ["session"]:
            return {"owner": "ada", "role": "admin", "is_read_only": False, "needs_key": False}
        case ["runs", run_id, *rest]:
            numbers = [number for number, run in enumerate(listed) if run["id"] == run_id]
            if rest == ["samples"]:
                return invented.samples(query)
            if rest[:1] == ["samples"]:
                return invented.sample_group()
            if not numbers or rest not in ([], ["metrics"], ["timing"]):
                return None
            if rest == ["timing"]:
                return invented.timing(float(query["seconds"]))
            if not rest:
                return listed[numbers[0]]
            after, limit = int(query.get("after", 0)), min(int(query["limit"]), 150)
            steps = listed[numbers[0]]["steps"]
            points = [invented.point(numbers[0], step) for step in range(1, steps + 1) if 7 * step > after]
            is_last = len(points) <= limit
            return {"points": points[:limit], "next_after": None if is_last else points[limit - 1]["seq"]}
    return None


class Handler(BaseHTTPRequestHandler):
    needs_key = False

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if path == "/api/v1/audit":
            return self.send(200, invented.audit())
        if path == "/oai/api/v1/models":
            names = ["Qwen/Qwen3-4B", "tinker://00000000-train-0/sampler_weights/step 240"]
            return self.send(200, {"data": [{"id": name} for name in names]})
        if path.startswith("/console/api/"):
            if self.needs_key and self.headers.get("X-Api-Key") != KEY:
                return self.send(401, {"error": "this API key is not known"})
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            if path == "/console/api/stream":
                return self.stream()
            found = answer(path.removeprefix("/console/api/"), query)
            return self.send(200, found) if found is not None else self.send(404, {"error": f"no {path}"})
        file = STATIC / path.removeprefix("/console/") if "/assets/" in path else STATIC / "index.html"
        return self.send(200, file.read_bytes(), MEDIA_TYPES[file.suffix])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/oai/api/v1/"):
            return self.complete(json.loads(body))
        self.send(404, {"error": "no such route"})

    def complete(self, asked: dict) -> None:
        """Stream a completion, and do it slowly where the prompt says so."""
        pause = 0.5 if "Slowly" in str(asked.get("prompt")) else 0.0
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in invented.completion(asked):
                self.wfile.write(event)
                self.wfile.flush()
                time.sleep(pause)
        except OSError:
            pass  # the page has stopped it

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for _ in range(100):
                self.wfile.write(b": alive\n\n")
                time.sleep(0.2)
        except OSError:
            pass  # the page has gone

    def send(self, status: int, body: object, media_type: str = "application/json") -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@contextmanager
def serving(*, needs_key: bool = False) -> Iterator[str]:
    """Serve on loopback, and give the address."""
    handler = type("StandIn", (Handler,), {"needs_key": needs_key})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    with serving() as address:
        print(f"{address}/console")
        threading.Event().wait()
