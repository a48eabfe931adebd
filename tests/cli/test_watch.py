import json
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest
from typer.testing import CliRunner

from spmd_tx.cli import main, watch

SESSION = "s"
RUN = f"{SESSION}:train:0"


class Receiver:
    """Answers as a server with two runs, of which one has the tags of the script."""

    def __init__(self):
        self.sent, self.ends, self.tags, self.refusals, self.is_open = [], [], [], 0, True
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                other = {"id": "other:train:0", "session_id": "other", "is_open": True, "tags": []}
                run = {"id": RUN, "session_id": SESSION, "is_open": receiver.is_open, "tags": receiver.tags}
                runs = [other, run]
                self.answer(200, {"runs": runs if receiver.tags else runs[:1], "next_cursor": None})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/tags":  # by the script, in place of the SDK
                    receiver.tags = body
                elif receiver.refusals:
                    receiver.refusals -= 1
                    return self.answer(503, {"detail": "not now"})
                elif self.path.endswith("/finish"):
                    receiver.ends.append((self.path, body))
                else:
                    receiver.sent.append((unquote(self.path), body))
                return self.answer(200, {})

            def answer(self, status, body):
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setattr(watch, "EVERY_SECONDS", 0.05)
    monkeypatch.setattr(watch, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(watch.signal, "signal", lambda *_: None)  # those of pytest stay
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


SCRIPT = """
import json, os, pathlib, sys, urllib.request
url, folder = sys.argv[1], pathlib.Path(sys.argv[2].removeprefix("log_path="))
tags = json.dumps(os.environ["TINKER_TAGS"].split(",")).encode()
urllib.request.urlopen(urllib.request.Request(url + "/tags", tags)).close()
with (folder / "metrics.jsonl").open("a") as file:
    for step in range(3):
        print(json.dumps({"step": step, "reward/total": step / 2, "note": "x"}), file=file)
sys.exit(3)
"""


def run(receiver, tmp_path, script=SCRIPT, **environment):
    command = ["watch", "--url", receiver.url, "--", sys.executable, "-c", script, receiver.url]
    return CliRunner().invoke(main.app, [*command, f"log_path={tmp_path}"], env=environment)


def test_what_a_script_logs_goes_to_its_run_and_its_exit_code_is_kept(receiver, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "reward/total": 9}\n')  # of another run
    receiver.refusals = 2
    result = run(receiver, tmp_path, TINKER_TAGS="mine")
    assert result.exit_code == 3, result.output
    route = f"/api/v1/training_runs/{RUN}/metrics"
    assert receiver.sent == [
        (route, {"metrics": {"reward/total": step / 2}, "step": step}) for step in range(3)
    ]
    assert receiver.tags[0] == "mine"
    assert f"metrics are at {receiver.url}/console/runs/{RUN}" in result.output
    how = {"reason": {"type": "errored"}, "detail": "the script ended with exit code 3"}
    assert receiver.ends == [(f"/api/v1/sessions/{SESSION}/finish", how)]


def test_the_server_is_told_once_it_answers_again_and_only_of_sessions_that_are_open(
    receiver, tmp_path, monkeypatch
):
    receiver.refusals = 5
    assert run(receiver, tmp_path, SCRIPT.replace("sys.exit(3)", "")).exit_code == 0
    assert [body for _, body in receiver.ends] == [{"reason": {"type": "success"}}]
    receiver.is_open = False
    assert run(receiver, tmp_path).exit_code == 3
    assert len(receiver.ends) == 1
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", 0.1)
    receiver.refusals = 1000
    assert "3 steps before it, were not sent: " in run(receiver, tmp_path).output


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (0, "success", None),
        (1, "errored", "exit code 1"),
        (-signal.SIGINT, "interrupted", "SIGINT"),
        (128 + signal.SIGTERM, "interrupted", "SIGTERM"),  # of a shell
        (-signal.SIGKILL, "interrupted", "SIGKILL"),
        (-signal.SIGSEGV, "errored", "Segmentation fault"),
        (-signal.SIGRTMAX, "errored", ""),
        (255, "errored", "exit code 255"),
    ],
)
def test_an_exit_code_says_how_a_script_has_ended(code, kind, words):
    said = watch.ending(code)
    assert said["reason"] == {"type": kind}
    assert (words is None) == ("detail" not in said)
    assert words is None or words in said["detail"]


def test_a_script_without_a_run_or_without_a_log_is_told_of(receiver, tmp_path):
    no_run = SCRIPT.replace("urllib.request.urlopen", "print")
    no_run = no_run.replace(", tags)).close()", ", tags))")
    assert "has opened no training run" in run(receiver, tmp_path, no_run).output
    (tmp_path / "metrics.jsonl").unlink()
    result = run(receiver, tmp_path, "pass")
    assert (result.exit_code, receiver.sent) == (0, [])
    assert "no log was found; name it with --log" in result.output


QUICK = SCRIPT.replace("log_path=", "").replace("sys.exit(3)", "")


def in_folder(receiver, folder, monkeypatch, place, script=QUICK):
    """Run a script that writes a log and ends before anybody looks, without a word about where it logs."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(watch.script_logs, "open_logs", lambda _: set())
    command = ["watch", "--url", receiver.url, "--", sys.executable, "-c", script, receiver.url, place]
    return CliRunner().invoke(main.app, command)


@pytest.mark.parametrize("place", [".", "runs/1/log"])
def test_the_log_of_a_short_script_is_found_in_its_folder(receiver, tmp_path, monkeypatch, place):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 9, "reward/total": 9}\n')
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "metrics.jsonl").write_text('{"step": 8, "reward/total": 8}\n')  # of an earlier start
    assert in_folder(receiver, tmp_path, monkeypatch, place).exit_code == 0
    assert [body["step"] for _, body in receiver.sent] == [0, 1, 2]


def test_of_several_logs_that_have_grown_none_is_taken(receiver, tmp_path, monkeypatch):
    beside = "pathlib.Path('other').mkdir(); pathlib.Path('other/metrics.jsonl').write_text('{}')\n"
    result = in_folder(receiver, tmp_path, monkeypatch, ".", QUICK + beside)
    assert receiver.sent == []
    assert "2 logs have grown, such as metrics.jsonl, other/metrics.jsonl" in result.output
    assert "no log was found; name it with --log" in result.output


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which files are open")
def test_a_log_that_another_process_has_open_is_not_the_scripts(receiver, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    beside = "open('other/metrics.jsonl', 'a').write('{\"step\": 7, \"reward/total\": 7}\\n')\n"
    with (tmp_path / "other" / "metrics.jsonl").open("a"):
        assert in_folder(receiver, tmp_path, monkeypatch, ".", QUICK + beside).exit_code == 0
        assert [body["step"] for _, body in receiver.sent] == [0, 1, 2]
        receiver.sent.clear()
        result = in_folder(receiver, tmp_path, monkeypatch, ".", beside)
    assert receiver.sent == []
    assert "no log was found; name it with --log" in result.output


def test_a_command_that_does_not_exist(receiver, tmp_path):
    result = CliRunner().invoke(main.app, ["watch", "--url", receiver.url, "--", str(tmp_path / "nothing")])
    assert result.exit_code != 0
    assert "cannot run" in str(result.exception)
