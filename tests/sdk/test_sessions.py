"""Sessions, traces, usage and the audit log, through the SDK and its command line."""

import csv
import json
import urllib.error
import urllib.request
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import tinker
from tinker import types
from typer.testing import CliRunner

from spmd_tx.cli.main import app
from spmd_tx.errors import StartError
from tests.sdk.examples import ADAM_STEP, SECONDS, batch, drawn, prompt, random_tokens
from tests.sdk.server import BASE_MODEL, Server
from tests.support.sdk_process import run_python, run_tinker, run_tinker_anew


@pytest.fixture(scope="module")
def admin(server: Server) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=server.url, api_key="tml-test")


@pytest.fixture(scope="module")
def session_id(server: Server) -> str:
    """A session that has trained, sampled and saved, and was finished."""
    client = tinker.ServiceClient(
        base_url=server.url,
        api_key="tml-test",
        user_metadata={"run": "7", "kind": "traced"},
        display_name="The Traced One",
        project_id="a project",
    )
    trainer = client.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result(SECONDS)
    data = batch(1)
    trainer.forward_backward(data, "cross_entropy").result(SECONDS)
    trainer.optim_step(ADAM_STEP).result(SECONDS)
    trainer.forward(data[:1], "cross_entropy").result(SECONDS)
    trainer.save_state("traced").result(SECONDS)
    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    sampler.sample(prompt(random_tokens(10, 1)), 3, drawn(5)).result(SECONDS)
    session_id = trainer.get_info().model_id.partition(":")[0]
    client.close("errored", detail="as planned").result(SECONDS)
    return session_id


def tinker_command(server: Server, *arguments: object) -> str:
    return run_tinker(*arguments, TINKER_BASE_URL=server.url, TINKER_API_KEY="tml-test")


def test_the_command_line_exports_a_trace_that_has_every_request(live_server, session_id, tmp_path):
    trace_file = tmp_path / "a.pftrace"
    tinker_command(live_server, "session", "export-trace", session_id, "--output", trace_file)
    trace = json.loads(trace_file.read_text())
    assert trace["otherData"]["display_name"] == "The Traced One"
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    requests = [event for event in slices if "seq_id" in event.get("args", {})]
    kinds = ["create_model", "forward", "forward_backward", "optim_step", "sample", "save_weights"]
    assert sorted(event["cat"] for event in requests) == [*kinds, "save_weights_for_sampler"]
    for kind in kinds:
        stages = [event["name"] for event in slices if event["cat"] == kind and "args" not in event]
        assert stages == ["queued", "batched", "device", "encoded"], kind
    tracks = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert tracks == {f"{session_id}:train:0", f"{session_id}:sample:0"}


def test_a_trace_is_fetched_without_a_key_but_not_without_its_signature(rest, session_id):
    url = rest.export_session_trace(session_id).result(SECONDS)
    with urllib.request.urlopen(url) as response:
        assert int(response.headers["content-length"]) == len(response.read()) > 0
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url.replace("signature=", "signature=0"))
    with refused.value as answer:
        assert answer.code == 403
    with pytest.raises(tinker.NotFoundError):
        rest.export_session_trace("no-such-session").result(SECONDS)


def hours() -> tuple[str, str]:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return (now - timedelta(hours=1)).isoformat(), (now + timedelta(hours=1)).isoformat()


def test_usage_counts_the_tokens_that_were_trained_and_sampled(admin, session_id):
    usage = admin.get_billing_usage(*hours()).result(SECONDS)
    mine = [event for event in usage.data if event.session_id == session_id]
    assert {event.estimated_cost_usd for event in mine} == {0.0}
    assert {event.project_id for event in mine} == {"a project"}
    counted = Counter()  # over the turn of an hour, too
    for event in mine:
        if (info := event.event_info).type not in ("storage", "checkpoint"):
            counted[info.type] += info.token_count
    data = batch(1)
    lengths = [datum.model_input.length for datum in data]
    assert counted == {"sampling_prefill": 10, "sampling_sample": 15, "training": sum(lengths) + lengths[0]}
    assert sum(event.event_info.count for event in mine if event.event_info.type == "checkpoint") == 1
    stored = [event.event_info.gigabyte_hours for event in mine if event.event_info.type == "storage"]
    assert all(amount > 0 for amount in stored)
    assert stored
    metadata = usage.sessions[session_id].user_metadata
    assert metadata == {"run": "7", "kind": "traced"}


def test_usage_of_more_than_fourteen_days_is_refused(admin):
    with pytest.raises(tinker.BadRequestError, match="14 days"):
        admin.get_billing_usage("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z").result(SECONDS)


def test_the_command_line_shows_usage_and_storage(live_server, session_id, tmp_path):
    for name, arguments in {"usage": hours(), "checkpoint-storage": ("--project-id", "a project")}.items():
        tinker_command(live_server, "billing", name, *arguments, "--csv", tmp_path / name)
    with (tmp_path / "usage").open() as file:
        assert {row["session_id"] for row in csv.DictReader(file)} >= {session_id}
    with (tmp_path / "checkpoint-storage").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["checkpoint_count"], row["estimated_monthly_cost_usd"]) == ("1", "0.0")
    assert int(row["size_bytes"]) > 0
    printed = json.loads(tinker_command(live_server, "--format", "json", "billing", "usage", *hours()))
    assert session_id in printed["sessions"]


def search(rest: tinker.RestClient, **wish: object) -> types.SessionSearchResponse:
    with pytest.warns(tinker.ExperimentalWarning):
        return rest.search_sessions(types.SessionSearchRequest(**wish)).result(SECONDS)


def every_id(rest: tinker.RestClient, **wish: object) -> set[str]:
    """Of the sessions on all pages of a search."""
    pages = [search(rest, limit=200, **wish)]
    while pages[-1].next_cursor is not None:
        pages.append(search(rest, limit=200, cursor=pages[-1].next_cursor, **wish))
    return {session.session_id for page in pages for session in page.sessions}


def test_a_session_is_found_by_all_that_is_known_of_it(rest, session_id):
    finished = {"type": "client_finished", "reasons": ["errored"]}
    for wish in (
        {"session_id": session_id},
        {"display_name": "one traced"},
        {"user_metadata": {"run": "7", "kind": "traced"}},
        {"project_ids": ["a project", "another"], "statuses": [finished, {"type": "failed"}]},
    ):
        (found,) = search(rest, **wish).sessions
        assert found.session_id == session_id
    assert found.display_name == "The Traced One"
    assert (found.owner, found.project_id, found.checkpoints_count) == ("local", "a project", 1)
    assert found.checkpoint_storage_bytes > 0
    assert found.status.reason.type == "errored"
    assert found.status.detail == "as planned"
    for wish in ({"user_metadata": {"run": "8"}}, {"display_name": "one untraced"}, {"project_ids": ["p"]}):
        assert search(rest, **wish).sessions == []


def test_a_search_goes_on_from_page_to_page(rest, session_id, service, other_service):
    for client in (service, other_service):
        client.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
    everything = [each.session_id for each in search(rest, limit=10).sessions]
    pages, cursor = [], None
    while not pages or (cursor is not None and len(pages) < len(everything)):
        page = search(rest, limit=1, cursor=cursor)
        pages += [each.session_id for each in page.sessions]
        cursor = page.next_cursor
    assert pages == everything
    assert len(everything) >= 3
    active = every_id(rest, statuses=[{"type": "active"}])
    assert active < every_id(rest)
    assert session_id not in active


def test_a_project_is_a_label_that_a_session_can_be_given_later(rest, session_id):
    def runs(project_id):
        found = rest.list_training_runs(project_id=project_id, limit=100).result(SECONDS)
        assert found.cursor.total_count == len(found.training_runs)
        return {run.training_run_id for run in found.training_runs}

    assert runs("a project") == {f"{session_id}:train:0"}
    rest.assign_session_project(session_id, "a new project").result(SECONDS)
    assert runs("a project") == set()
    assert runs("a new project") == {f"{session_id}:train:0"}
    rest.assign_session_project(session_id, "a project").result(SECONDS)


def test_the_audit_log_tells_what_was_done(admin, session_id, rest):
    path = f"tinker://{session_id}:train:0/weights/traced"
    today = datetime.now(UTC).date()
    entries = [  # of work over midnight, too
        entry
        for days in (1, 0)
        for entry in admin.get_audit_log(day=today - timedelta(days)).result(SECONDS).entries
    ]
    mine = [entry for entry in entries if entry.event_details.get("session_id") == session_id]
    events = [entry.event for entry in mine]
    assert events[0] == "session_created"
    assert {"checkpoint_saved", "session_ended"} < set(events)
    (saved,) = [entry for entry in mine if entry.event == "checkpoint_saved"]
    assert (saved.tinker_path, saved.event_details["actor"]) == (path, "local")
    of_checkpoints = admin.get_audit_log("checkpoints", day=saved.timestamp.date()).result(SECONDS).entries
    assert {entry.event.partition("_")[0] for entry in of_checkpoints} == {"checkpoint"}
    assert admin.get_audit_log(day=today - timedelta(days=2)).result(SECONDS).entries == []


def test_the_script_of_the_guide_runs(live_server, tmp_path):
    script = Path(__file__).parents[2] / "docs" / "examples" / "sessions.py"
    where = ["--base-url", live_server.url, "--base-model", BASE_MODEL, "--trace", tmp_path / "trace"]
    lines = run_python(script, *where, TINKER_API_KEY="tml-test").splitlines()
    assert lines[0].endswith("client_finished, success, capitals")
    assert json.loads((tmp_path / "trace").read_text())["otherData"]["display_name"] == "First steps"
    assert {line.split()[1] for line in lines if line.startswith("used")} == {
        "training:",
        "sampling_prefill:",
        "sampling_sample:",
    }
    assert [line.split()[1] for line in lines if " by " in line] == [
        "session_created",
        "checkpoint_saved",
        "session_ended",
    ]


def test_the_command_line_logs_in_and_out(live_server, tmp_path, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    place = {"TINKER_BASE_URL": live_server.url, "HOME": str(tmp_path)}

    def auth(command: str, answer: str = "") -> str:
        run = partial(run_tinker_anew, answer=answer) if answer else run_tinker
        return run("auth", command, **place)

    assert "Logged in as local (spmd_tx)" in auth("login", "tml-anything\n")
    assert "Tinker accessible: yes" in auth("status")
    assert "Removed credential" in auth("logout")


def test_the_command_line_shows_runs_and_their_metrics(server, session_id):
    run, runner = f"{session_id}:train:0", CliRunner()

    def runs(*arguments: str) -> str:
        done = runner.invoke(app, ["runs", *arguments, "--url", server.url], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    (found,) = (each for each in json.loads(runs("list", "--most", "1000", "--json")) if each["id"] == run)
    assert (found["steps"], found["rank"], found["is_open"]) == (1, 4, False)
    assert found["last"].keys() >= {"loss:sum", "unclipped_grad_l2:mean", "learning_rate:mean"}
    (point,) = json.loads(runs("show", run, "--json"))
    assert point["metrics"]["loss:sum"] == found["last"]["loss:sum"] > 0
    assert run in runs("list", "--most", "1000")
    assert "step" in runs("show", run)
    missing = runner.invoke(app, ["runs", "show", run, "--metric", "reward", "--url", server.url])
    assert isinstance(missing.exception, StartError)
    assert "has no metric 'reward'" in str(missing.exception)


def test_the_command_line_lists_checkpoints_with_their_step_and_marks_the_best(server, session_id):
    run, runner = f"{session_id}:train:0", CliRunner()

    def checkpoints(*arguments: str) -> str:
        done = runner.invoke(app, ["checkpoints", *arguments, "--url", server.url], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    def listed() -> list[dict]:
        return json.loads(checkpoints("list", "--run", run, "--metric", "learning_rate:mean", "--json"))

    (saved,) = listed()
    path = saved["checkpoint"]["tinker_path"]
    assert (path, saved["step"], saved["checkpoint"]["best"]) == (f"tinker://{run}/weights/traced", 1, False)
    assert saved["loss"] > 0
    assert saved["value"] > 0
    checkpoints("mark", path)
    assert [each["checkpoint"]["best"] for each in listed()] == [True]
    assert "weights/traced" in checkpoints("list", "--run", run)
