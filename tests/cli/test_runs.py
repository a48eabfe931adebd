import io
import json
import sys
import threading
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest
from rich.console import Console

from spmd_tx.cli import main, run_tables, runs

RUN = "33a946d9-e2a5-472d-950c-3d089539a1ac:train:0"
HEALTHS = [
    {"state": "running", "reason": None, "failed": 0},
    {"state": "left", "reason": "no heartbeat for 95 s, all steps are saved", "failed": 0},
    {"state": "errored", "reason": "KeyError: 'x\x1b[2J'", "failed": 0},
]
SENTENCES = {
    "running": "running",
    "left": "client left: no heartbeat for 95 s, all steps are saved",
    "errored": "errored: KeyError: 'x\N{REPLACEMENT CHARACTER}[2J'",
}


def point(step, **metrics):
    return {"seq": step, "step": step, "at": 1_764_000_000.0 + step, "metrics": {"loss:sum": 1.5} | metrics}


class Stub:
    """Answers like a server: with points, or with what a test puts in their place."""

    def __init__(self):
        self.points = [point(step) for step in range(3)]
        self.runs = [{"id": RUN, "owner": "ada", "created_at": 0.0, "steps": 3, "last": {"loss:sum": 1.5}}]
        self.logged = []
        self.changes, self.asked = [], {}
        self.looks = []  # what the next looks get instead: bytes, or a status
        self.key = None
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                stub.key = self.headers["X-Api-Key"]
                wanted = stub.looks.pop(0) if stub.looks else stub.answer(self.path)
                status, body = (wanted, b"{}") if isinstance(wanted, int) else (200, wanted)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_PATCH(self):
                stub.changes.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.do_GET()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path):
        if path.startswith("/console/api/runs/"):
            return json.dumps(self.runs[0]).encode()
        if path.startswith("/console"):
            self.asked = parse_qs(path.partition("?")[2])
            return json.dumps({"runs": self.runs, "next_cursor": None}).encode()
        after = int(path.rpartition("=")[2])
        newer = [each for each in self.points if each["seq"] > after]
        answer = {"points": newer, "next_after": None}
        logged_after = int(parse_qs(path.partition("?")[2])["logged_after"][0])
        logged = [each for each in self.logged if each["number"] > logged_after]
        if len(logged) > 2:
            answer["next_logged_after"] = logged[1]["number"]
        return json.dumps(answer | ({"logged": logged[:2]} if logged else {})).encode()


@pytest.fixture
def stub():
    stub = Stub()
    threading.Thread(target=stub.server.serve_forever, args=(0.01,), daemon=True).start()
    yield stub
    stub.server.shutdown()
    stub.server.server_close()


@pytest.fixture
def spmd_tx_runs(monkeypatch, capsys, stub):
    def run(*arguments, url=stub.url):
        monkeypatch.setattr(sys, "argv", ["spmd-tx", "runs", *arguments, "--url", url])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code, capsys.readouterr()

    return run


def test_runs_are_listed_without_a_terminal_and_nothing_is_cut(stub, spmd_tx_runs):
    stub.runs[0]["owner"] = "o" * 200
    code, output = spmd_tx_runs("list", "--api-key", "tml-1")
    assert code == 0
    assert stub.key == "tml-1"
    row = output.out.splitlines()[1].split()
    assert (row[0], row[1], row[-2:]) == (RUN, "o" * 200, ["3", "1.5"])


def test_without_runs_the_list_says_so(stub, spmd_tx_runs):
    stub.runs = []
    assert spmd_tx_runs("list")[1].out == "there are no runs yet\n"


def test_names_of_clients_do_not_steer_the_terminal(stub, spmd_tx_runs):
    stub.runs[0] |= {"owner": "a\x1b[2Jda", "last": {"re\x1b]0;title\x07ward": 1.0}}
    stub.points = [point(0, **{"x\x1b[2J": 1.0})]
    for arguments in (("list",), ("show", RUN)):
        assert "\x1b" not in spmd_tx_runs(*arguments)[1].out


@pytest.mark.parametrize("url", ["localhost:8000", "", "file:///etc/passwd", "http://127.0.0.1:1/a b"])
def test_what_is_no_address_is_refused(spmd_tx_runs, url):
    code, output = spmd_tx_runs("list", url=url)
    assert code == 2
    assert output.err.startswith(f"spmd-tx: --url is {url!r}")


def test_a_key_of_other_letters_is_refused(spmd_tx_runs):
    code, output = spmd_tx_runs("list", "--api-key", "ключ")
    assert code == 2
    assert output.err.startswith("spmd-tx: the API key has characters that no key has")


@pytest.mark.parametrize(
    "answer, complaint",
    [(b"<html>", "does not answer with JSON"), (401, "refuses this"), (503, "refuses this")],
)
def test_an_answer_that_says_no_is_an_error_in_one_line(stub, spmd_tx_runs, answer, complaint):
    stub.looks = [answer]
    code, output = spmd_tx_runs("show", RUN)
    assert code == 2
    assert complaint in output.err
    assert "Traceback" not in output.err


def test_tail_prints_a_line_per_step_and_outlasts_a_restart_of_the_server(stub, spmd_tx_runs, monkeypatch):
    stub.points = []

    def sleep(_):
        steps = len(stub.points)
        if steps == 5:
            raise KeyboardInterrupt
        if steps == 2:
            stub.looks = [503]
        if stub.points:
            stub.points[-1]["metrics"]["reward"] = 0.25  # sent by the client after the step
        stub.points.append(point(steps))

    monkeypatch.setattr(runs.time, "sleep", sleep)
    code, output = spmd_tx_runs("tail", RUN)
    assert code == 0
    lines = [line.split("  ") for line in output.out.splitlines()]
    assert [line[0] for line in lines] == [f"step {n}" for n in range(4)]
    assert all(line[2:] == ["reward 0.25", "loss:sum 1.5"] for line in lines)
    assert "trying again" in output.err


def logged(number, step, **metrics):
    return {"number": number, "step": step, "at": 1_764_000_000.0, "metrics": metrics}


def test_what_a_client_sends_is_shown_with_its_own_steps(stub, spmd_tx_runs):
    stub.logged = [logged(1, 70, reward=0.5), logged(4, 5000, reward=0.75), logged(5, 70, kl=0.125)]
    code, output = spmd_tx_runs("show", RUN)
    assert code == 0
    servers, clients = output.out.split(run_tables.BY_CLIENT)
    assert "reward" not in servers
    rows = [line.split() for line in clients.split("\n\n")[0].splitlines()]
    assert [row[2:] for row in rows if row[:1] == ["70"]] == [["0.5", "0.125"]]
    assert [row[2:] for row in rows if row[:1] == ["5000"]] == [["0.75", "-"]]
    shown = json.loads(spmd_tx_runs("show", RUN, "--json")[1].out)
    assert [each["step"] for each in shown] == [0, 1, 2, 70, 5000]
    only = spmd_tx_runs("show", RUN, "--metric", "reward")[1].out
    assert "5000" in only
    assert "loss:sum" not in only
    assert spmd_tx_runs("show", RUN, "--metric", "none")[0] == 2


def test_tail_prints_what_a_client_sends_as_it_comes(stub, spmd_tx_runs, monkeypatch):
    def sleep(_):
        if len(stub.logged) == 2:
            raise KeyboardInterrupt
        stub.logged.append(logged(1 + len(stub.logged), 70, **{f"metric {len(stub.logged)}": 1.0}))

    monkeypatch.setattr(runs.time, "sleep", sleep)
    lines = [line.split("  ") for line in spmd_tx_runs("tail", RUN)[1].out.splitlines()]
    sent = [line[2:] for line in lines if line[0] == "client's step 70"]
    assert sent == [["metric 0 1"], ["metric 0 1", "metric 1 1"]]


@pytest.mark.parametrize("width", [200, 100, 80, 60, 50, 30])
def test_tables_and_curves_are_no_wider_than_the_terminal(stub, width):
    console = Console(width=width, height=24, record=True, file=io.StringIO())
    points = [point(step, reward=step / 150, **{"kl:mean": 1e-7}) for step in range(150)]
    console.print(run_tables.of_steps(RUN, points, None, console))
    lines = console.export_text().rstrip().splitlines()
    rows = [line for line in lines if line.split()[:1] == ["149"]]
    assert len(rows) == 1
    at = datetime.fromtimestamp(points[-1]["at"]).strftime("%H:%M:%S")
    assert {*rows[0].split()} <= {"149", at, "0.9933", "1.5", "1e-07"}
    assert lines[-1].split() == ["0", "149", "step"]
    assert len(lines) == 1 + run_tables.LAST_STEPS + 1 + 1 + run_tables.CURVE_HEIGHT + 2


def test_a_curve_of_the_largest_numbers_is_drawn():
    console = Console(width=80, record=True, file=io.StringIO())
    points = [point(step, x=(-1) ** step * 1.7e308) for step in range(20)]
    console.print(run_tables.of_steps(RUN, points, "x", console))
    assert "too far apart" in console.export_text()


def test_a_metric_without_a_finite_value_has_no_curve():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(run_tables.of_steps(RUN, [point(0, x=None)], "x", console))
    assert "x has no finite value" in console.export_text()


@pytest.mark.parametrize("command", ["show", "tail"])
def test_a_run_is_named_by_the_beginning_of_its_id(stub, spmd_tx_runs, monkeypatch, command):
    monkeypatch.setattr(runs.time, "sleep", interrupted)
    code, output = spmd_tx_runs(command, RUN[:6])
    assert (code, output.err) == (0, "")


@pytest.mark.parametrize(
    "others, beginning, complaint",
    [
        ([], "44", "there is no run '44'; spmd-tx runs list shows the IDs"),
        ([], "", "there is no run ''"),
        ([{"id": "33a9ffff:train:0"}], "33a9", f"{RUN} and 33a9ffff:train:0 begin with '33a9'; give more"),
    ],
)
def test_a_beginning_that_names_no_single_run_is_refused(stub, spmd_tx_runs, others, beginning, complaint):
    stub.runs += others
    code, output = spmd_tx_runs("show", beginning)
    assert (code, output.err.count("\n")) == (2, 1)
    assert complaint in output.err


def test_a_list_is_searched_and_sorted_by_the_server(stub, spmd_tx_runs):
    assert spmd_tx_runs("list", "--search", "a&b c", "--sort", "group", "--all")[0] == 0
    asked = {name: values[0] for name, values in stub.asked.items()}
    assert asked == {"search": "a&b c", "sort": "group", "archived": "true", "limit": "20", "cursor": "0"}
    stub.runs = []
    assert spmd_tx_runs("list", "--search", "x")[1].out == "no run has 'x'\n"


def test_names_and_groups_are_shown_where_there_are_any(stub, spmd_tx_runs):
    stub.runs[0] |= {"name": "a\x1bb", "group": None, "archived_at": 5.0}
    heading, row = spmd_tx_runs("list")[1].out.splitlines()
    assert heading.split()[:5] == ["run", "name", "owner", "created", "state"]
    assert "a\N{REPLACEMENT CHARACTER}b" in row
    assert "archived" in row


@pytest.mark.parametrize(
    "options, change",
    [
        (["--name", "best", "--group", ""], {"name": "best", "group": None}),
        (["--archive"], {"archived": True}),
        (["--restore"], {"archived": False}),
    ],
)
def test_a_run_is_renamed_and_archived(stub, spmd_tx_runs, options, change):
    code, output = spmd_tx_runs("change", RUN[:6], *options)
    assert (code, stub.changes) == (0, [change])
    assert RUN in output.out


def test_a_change_says_what_to_change(stub, spmd_tx_runs):
    code, output = spmd_tx_runs("change", RUN)
    assert (code, stub.changes) == (2, [])
    assert "give --name, --group, --archive or --restore" in output.err


@pytest.mark.parametrize("health", HEALTHS, ids=lambda health: health["state"])
def test_a_list_has_the_state_of_each_run_and_a_run_its_reason(stub, spmd_tx_runs, health):
    assert "state" not in spmd_tx_runs("list")[1].out  # an older server does not tell it
    stub.runs[0]["health"] = health
    heading, row = spmd_tx_runs("list")[1].out.splitlines()
    assert row.split()[heading.split().index("state") + 1] == health["state"]  # a date has two words
    (told,) = [line for line in spmd_tx_runs("show", RUN)[1].out.splitlines() if health["state"] in line]
    assert told == SENTENCES[health["state"]]


def interrupted(_):
    raise KeyboardInterrupt
