"""Serves the built console with invented runs, by the routes under /console/api. Runs no coordinator."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.console import invented, invented_server, invented_trajectory

STATIC = Path(__file__).parents[2] / "spmd_tx/coordinator/http/console/static"
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
KEY = "tml-known"
CHANGES: dict[str, dict[str, object]] = {}  # of runs, by ID
BEST: set[str] = set()  # paths of checkpoints


def answer(path: str, query: dict[str, str]) -> dict | None:
    listed = [run | CHANGES.get(run["id"], {}) for run in invented.runs()]
    if path == "runs":
        return {"runs": _searched(listed, query), "next_cursor": None}
    match path.split("/"):
        case ["open_runs"]:
            silent = {"state": "silent", "reason": "no heartbeat for 14 s", "failed": 3}
            silent["last_failure"] = invented.FAILURE
            return {"runs": {each["id"]: silent for each in listed if each["is_open"]}, "is_cut": False}
        case ["server"]:
            return invented_server.server()
        case ["checkpoints"]:
            return _marked(invented.saved_checkpoints())
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
                return invented.sample_group(rest[1])
            if not numbers or rest not in ([], ["metrics"], ["timing"], ["curves"]):
                return None
            if rest == ["timing"]:
                return invented.timing(float(query["seconds"]))
            if not rest:
                return listed[numbers[0]]
            if rest == ["curves"]:
                return invented.curves(numbers[0], listed[numbers[0]]["steps"], query)
            after, limit = int(query.get("after", 0)), min(int(query["limit"]), 150)
            steps = listed[numbers[0]]["steps"]
            points = [invented.point(numbers[0], step) for step in range(1, steps + 1) if 7 * step > after]
            is_last = len(points) <= limit
            return {"points": points[:limit], "next_after": None if is_last else points[limit - 1]["seq"]}
    return None


def _marked(listed: dict) -> dict:
    for each in listed["checkpoints"]:
        each["checkpoint"]["best"] = each["checkpoint"]["tinker_path"] in BEST
    return listed


def _searched(listed: list[dict], query: dict[str, str]) -> list[dict]:
    words = query.get("search", "").lower().split()
    found = [run for run in listed if all(word in json.dumps(run).lower() for word in words)]
    if query.get("archived") != "true":
        found = [run for run in found if run["archived_at"] is None]
    column = {"rank": "rank", "model": "base_model", "owner": "owner"}.get(
        query.get("sort", ""), "created_at"
    )
    return sorted(found, key=lambda run: run[column], reverse=query.get("ascending") != "true")


class StreamCount:
    """Counts the streams that are open, and how many there were at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            yield
        finally:
            with self._lock:
                self.now -= 1


class Handler(BaseHTTPRequestHandler):
    needs_key = False
    has_rights = True  # of an admin
    streams = StreamCount()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if path == "/api/v1/audit":
            return self.send(200, invented.audit())
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if path.startswith("/api/v1/trajectories"):
            is_list = path == "/api/v1/trajectories"
            return self.send(
                200, invented_trajectory.listed() if is_list else invented_trajectory.tree(query)
            )
        if path == "/api/v1/checkpoints":
            return self.send(
                200,
                {
                    "checkpoints": [
                        each["checkpoint"] for each in _marked(invented.saved_checkpoints())["checkpoints"]
                    ]
                },
            )
        if path == "/oai/api/v1/models":
            names = ["Qwen/Qwen3-4B", "tinker://00000000-train-0/sampler_weights/step 240"]
            return self.send(200, {"data": [{"id": name} for name in names]})
        if path.startswith("/console/api/"):
            if self.needs_key and self.headers.get("X-Api-Key") != KEY:
                return self.send(401, {"error": "this API key is not known"})
            if path == "/console/api/stream":
                with self.streams.one_more():
                    return self.stream()
            if path == "/console/api/stream-count":  # for the test
                return self.send(200, {"now": self.streams.now, "most": self.streams.most})
            if path == "/console/api/server" and not self.has_rights:
                return self.send(403, {"error": "this key is not an admin's"})
            if "/images/" in path:
                return self.send(200, invented.PICTURE, "image/png")
            found = answer(path.removeprefix("/console/api/"), query)
            return self.send(200, found) if found is not None else self.send(404, {"error": f"no {path}"})
        file = STATIC / path.removeprefix("/console/") if "/assets/" in path else STATIC / "index.html"
        return self.send(200, file.read_bytes(), MEDIA_TYPES[file.suffix])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/oai/api/v1/"):
            asked = json.loads(body)
            return self.send(200, invented.scored(asked)) if asked.get("echo") else self.complete(asked)
        if self.path.endswith("/best"):
            return self.mark(is_best=True)
        self.send(404, {"error": "no such route"})

    def do_DELETE(self) -> None:
        self.mark(is_best=False)

    def mark(self, *, is_best: bool) -> None:
        """Mark a checkpoint, as /api/v1/training_runs/RUN/checkpoints/KIND/NAME/best does."""
        path = unquote(self.path).removeprefix("/api/v1/training_runs/").removesuffix("/best")
        BEST.clear()
        if is_best:
            BEST.add("tinker://" + path.replace("/checkpoints/", "/", 1))
        self.send(200, {"status": "ok"})

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = unquote(self.path).removeprefix("/console/api/")
        known = CHANGES.setdefault(path.removeprefix("runs/"), {})
        if "archived" in body:
            known["archived_at"] = invented.START if body.pop("archived") else None
        known |= body
        self.send(200, answer(path, {}))

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
            for _ in range(300):
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
def serving(*, needs_key: bool = False, has_rights: bool = True) -> Iterator[str]:
    """Serve on loopback, and give the address."""
    CHANGES.clear()
    BEST.clear()
    members = {"needs_key": needs_key, "has_rights": has_rights, "streams": StreamCount()}
    handler = type("StandIn", (Handler,), members)
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
