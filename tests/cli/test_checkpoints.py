import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from spmd_tx.cli import checkpoints, main

RUN = "33a946d9-e2a5-472d-950c-3d089539a1ac:train:0"


def saved(number, **news):
    name = f"weights/{number:06}"
    checkpoint = {
        "checkpoint_id": name,
        "tinker_path": f"tinker://{RUN}/{name}",
        "time": "2026-01-02T03:04:05Z",
        "best": False,
    }
    return {"checkpoint": checkpoint, "step": number, "metric": "reward", "value": 0.5, "loss": 1.5} | news


class Stub:
    """Answers like a server with checkpoints, newest first."""

    def __init__(self):
        self.checkpoints, self.asked, self.marks = [], [], []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                query = {name: text for name, (text,) in parse_qs(urlsplit(self.path).query).items()}
                stub.asked.append(query)
                first, limit = int(query["offset"]), int(query["limit"])
                page = stub.checkpoints[first : first + limit]
                self.answer({"checkpoints": page, "cursor": {"total_count": len(stub.checkpoints)}})

            def do_POST(self):
                stub.marks.append((self.command, self.path))
                self.answer({"status": "ok"})

            do_DELETE = do_POST

            def answer(self, body):
                content = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def stub():
    stub = Stub()
    threading.Thread(target=stub.server.serve_forever, args=(0.01,), daemon=True).start()
    yield stub
    stub.server.shutdown()
    stub.server.server_close()


@pytest.fixture
def command(monkeypatch, capsys, stub):
    def run(*arguments):
        url = f"http://127.0.0.1:{stub.server.server_port}"
        monkeypatch.setattr(sys, "argv", ["spmd-tx", "checkpoints", *arguments, "--url", url])
        with pytest.raises(SystemExit) as ended:
            main.main()
        output = capsys.readouterr()
        return ended.value.code, output.err or output.out

    return run


def test_each_checkpoint_has_step_metrics_and_mark(stub, command):
    stub.checkpoints = [saved(8), saved(4, value=None, loss=None, metric=None, step=None)]
    stub.checkpoints[0]["checkpoint"]["best"] = True
    code, text = command("list")
    assert code == 0
    first, second = (line.split() for line in text.splitlines()[1:])
    assert first[:-2] == [f"tinker://{RUN}/weights/000008", "best", "8", "reward", "0.5", "1.5"]
    assert second[:-2] == [f"tinker://{RUN}/weights/000004", "-", "-", "-", "-"]


def test_checkpoints_of_a_run_have_short_names(stub, command):
    stub.checkpoints = [saved(8)]
    code, text = command("list", "--run", RUN, "--metric", "kl:mean")
    assert (code, text.splitlines()[1].split()[0]) == (0, "weights/000008")
    assert stub.asked == [{"run": RUN, "metric": "kl:mean", "limit": "20", "offset": "0"}]


@pytest.mark.parametrize(("sort", "steps"), [("created", [9, 8]), ("value", [1, 0]), ("loss", [2, 0])])
def test_the_order_is_one_of_all_checkpoints(stub, command, monkeypatch, sort, steps):
    monkeypatch.setattr(checkpoints, "PAGE", 4)
    stub.checkpoints = [saved(number) for number in range(9, -1, -1)]
    stub.checkpoints[-1] |= {"value": 0.7, "loss": 1.2}
    stub.checkpoints[-2] |= {"value": 0.9, "loss": None}
    stub.checkpoints[-3] |= {"value": None, "loss": 1.1}
    _, text = command("list", "--sort", sort, "--most", "2", "--json")
    assert [each["step"] for each in json.loads(text)] == steps


def test_without_checkpoints_the_list_says_so(command):
    assert command("list") == (0, "there are no checkpoints yet\n")


def test_a_mark_is_set_and_taken_away(stub, command):
    path = f"tinker://{RUN}/weights/000008"
    assert command("mark", path) == (0, f"{path} is marked as the best of its run\n")
    assert command("mark", path, "--remove") == (0, f"{path} has no mark any more\n")
    route = "/api/v1/training_runs/33a946d9-e2a5-472d-950c-3d089539a1ac%3Atrain%3A0/checkpoints"
    assert stub.marks == [(method, f"{route}/weights/000008/best") for method in ("POST", "DELETE")]


def test_the_run_of_a_path_may_be_named_by_its_beginning(stub, command, monkeypatch):
    monkeypatch.setattr(checkpoints, "whole_id", lambda _, beginning: {"33a": RUN}[beginning])
    path = f"tinker://{RUN}/weights/000008"
    assert command("mark", "tinker://33a/weights/000008") == (0, f"{path} is marked as the best of its run\n")


def test_what_is_no_path_is_refused_before_a_server_is_asked(stub, command):
    code, text = command("mark", "weights/000008")
    assert code == 2
    assert "is not a checkpoint path" in text
    assert stub.marks == []
