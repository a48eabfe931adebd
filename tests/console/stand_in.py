"""Serves the built console with invented runs, by the routes under /console/api. Runs no coordinator."""

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

STATIC = Path(__file__).parents[2] / "spmd_tx/coordinator/http/console/static"
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
STEPS = 400
KEY = "tml-known"
START = 1_790_000_000.0  # seconds since the epoch


def runs() -> list[dict]:
    names = [
        "arithmetic rl",
        "arithmetic, half rate",
        "sft on capitals",
        "distillation",
        "<b>odd & name</b>",
    ]
    return [
        {
            "id": f"{number:08x}-train-0",
            "session_id": f"session-{number}",
            "base_model": "Qwen/Qwen3-4B" if number < 3 else "openai/gpt-oss-20b",
            "rank": 32,
            "owner": "ada",
            "created_at": START - 3600 * number,
            "is_open": number == 0,
            "metadata": {"name": name, "optimizer": {"learning_rate": 1e-4}},
            "steps": STEPS if number < 4 else 0,
            "last_at": START - 3600 * number + 4 * STEPS if number < 4 else None,
            "last": point(number, STEPS)["metrics"] if number < 4 else {},
        }
        for number, name in enumerate(names)
    ]


def point(run: int, step: int) -> dict:
    noise = math.sin(step * 12.9898 + run * 78.233) * 43758.5453 % 1 - 0.5
    progress = 1 - math.exp(-step / (90 + 60 * run))
    return {
        "seq": 7 * step,
        "step": step,
        "at": START - 3600 * run + 4.0 * step,
        "metrics": {
            "loss:sum": 4096 * (2.4 - 1.5 * progress + 0.2 * noise),
            "num_tokens:sum": 4096,
            "reward": None if step == 100 else 0.9 * progress + 0.15 * noise,
            "entropy:mean": 1.2 - 0.8 * progress + 0.05 * noise,
            "unclipped_grad_l2:mean": 0.4 + 0.3 * abs(noise),
            "learning_rate:mean": 1e-4 * (1 - step / 500),
        },
    }


def answer(path: str, query: dict[str, str]) -> dict | None:
    listed = runs()
    if path == "runs":
        return {"runs": listed, "next_cursor": None}
    match path.split("/"):
        case ["runs", run_id, *rest]:
            numbers = [number for number, run in enumerate(listed) if run["id"] == run_id]
            if not numbers or rest not in ([], ["metrics"]):
                return None
            if not rest:
                return listed[numbers[0]]
            after, limit = int(query.get("after", 0)), min(int(query["limit"]), 150)
            steps = listed[numbers[0]]["steps"]
            points = [point(numbers[0], step) for step in range(1, steps + 1) if 7 * step > after]
            is_last = len(points) <= limit
            return {"points": points[:limit], "next_after": None if is_last else points[limit - 1]["seq"]}
    return None


class Handler(BaseHTTPRequestHandler):
    needs_key = False

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
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
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send(404, {"error": "no such route"})

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
