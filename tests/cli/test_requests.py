import asyncio
import io
import json
import sys
from types import SimpleNamespace

import msgspec
import pytest
from sqlalchemy import Select, select, update

from spmd_tx.cli import main
from spmd_tx.coordinator.requests.records import Failed, Finished
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.coordinator.storage.tables import AuditRow, RequestRow, SessionRow
from tests.coordinator.conftest import run_queue
from tests.coordinator.training.bench import forward_backward
from tests.support.databases import make_database

ODD = b'{"text": "\\u001b[2J\\u0000", "numbers": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}'


@pytest.fixture
def data_dir(tmp_path):
    """Make a stopped server's data: two owners, four requests."""
    directory = tmp_path / "data"
    make_database(directory)
    asyncio.run(fill(directory))
    return directory


async def fill(data_dir):
    database = await open_database(None, data_dir)
    async with database.transaction() as db:
        for owner in ("alice", "bob"):
            db.add(SessionRow(id=f"{owner}-1", created_at=1.0, tags=[], owner=owner))
    async with run_queue(database, data_dir) as queue:
        for seq_id, kind, body in (
            (0, "create_model", b"{}"),
            (1, "forward_backward", forward_backward(10, 20)),
            (2, "optim_step", ODD),
        ):
            request_id = await queue.submit(kind, "alice-1:train:0", seq_id, "alice-1", body)
            if seq_id == 0:
                queue.resolve(request_id, Finished("application/json", b"{}"))
        sample = await queue.submit("sample", "bob-1:sample:0", 0, "bob-1", b"not JSON \x1b[2J")
        queue.resolve(sample, Failed("nothing\x1b[2J can be done", "user"))
        await queue.submit(
            "sample", "bob-1:sample:0", 1, "bob-1", msgspec.json.encode({"a": {"b": [[[[[[]]]]]]}})
        )
        await queue.flush()
    await database.close()


@pytest.fixture
def run(monkeypatch, capsys, data_dir):
    """Run ``spmd-tx requests`` on one data directory."""

    def run(*arguments: str, data_dir=data_dir) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["spmd-tx", "requests", *arguments, "--data-dir", str(data_dir)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        monkeypatch.setenv("COLUMNS", "250")
        with pytest.raises(SystemExit) as exit_:
            main.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=exit_.value.code or 0, out=printed.out, err=printed.err)

    return run


@pytest.fixture
def ids(run):
    """Return the ids by kind and number."""
    return {
        (each["kind"], each["seq_id"]): each["id"] for each in json.loads(run("list", "--all", "--json").out)
    }


def in_rows(data_dir, query):
    async def work():
        database = await open_database(None, data_dir)
        async with database.transaction() as db:
            rows = await db.execute(query)
            found = rows.all() if isinstance(query, Select) else None
        await database.close()
        return found

    return asyncio.run(work())


def test_the_list_shows_what_has_no_result_the_oldest_first(run):
    listed = json.loads(run("list", "--json").out)
    assert [(each["kind"], each["owner"], each["state"]) for each in listed] == [
        ("forward_backward", "alice", "unfinished"),
        ("optim_step", "alice", "unfinished"),
        ("sample", "bob", "unfinished"),
    ]
    table = run("list").out
    assert "alice-1:...:train:0" in table
    assert all(each["id"][:8] in table for each in listed)


def test_the_list_can_be_narrowed(run):
    def kinds(*options):
        return [each["kind"] for each in json.loads(run("list", "--json", *options).out)]

    assert kinds("--owner", "bob") == ["sample"]
    assert kinds("--kind", "optim_step") == ["optim_step"]
    assert kinds("--all") == ["sample", "sample", "optim_step", "forward_backward", "create_model"]
    assert kinds("--all", "--most", "1") == ["sample"]
    assert "2 more; --most shows more" in run("list", "--most", "1").out


def test_a_request_is_shown_with_what_is_in_it(run, ids):
    shown = run("show", ids["forward_backward", 1]).out
    for fact in ("owner:                  alice", "examples: 2", "tokens: 30", "losses of the server:   0"):
        assert fact in shown
    assert "loss: cross_entropy" in shown


def test_no_body_and_no_error_reaches_the_terminal_as_it_is(run, ids):
    shown = run("show", ids["optim_step", 2]).out
    assert r"text: '\x1b[2J\x00'" in shown
    assert "numbers: [1, 2, 3, 4, 5, 6, 7, 8, ... 2 more]" in shown
    unreadable = run("show", ids["sample", 0]).out
    assert "cannot be read" in unreadable
    assert "\x1b" not in shown + unreadable
    assert "can be done" in unreadable
    assert "[[...]]" in run("show", ids["sample", 1]).out


def test_a_body_whose_file_is_gone_is_no_reason_to_show_nothing(run, ids, data_dir):
    place = {"payload_body": None, "payload_file": 77, "payload_offset": 0, "payload_length": 9}
    in_rows(data_dir, update(RequestRow).where(RequestRow.kind == "optim_step").values(**place))
    shown = run("show", ids["optim_step", 2])
    assert shown.code == 0
    assert "000000000077.zst is missing" in shown.out


def test_a_request_is_given_up_with_a_reason_and_an_entry_in_the_audit_log(run, ids, data_dir):
    request_id = ids["optim_step", 2]
    given_up = run("fail", request_id[:8], "--reason", "it ends the server", "--yes")
    assert given_up.code == 0
    assert "Given up." in given_up.out
    assert json.loads(run("show", request_id, "--json").out)["given up because"] == "it ends the server"
    states = {each["id"]: each["state"] for each in json.loads(run("list", "--json").out)}
    assert states[request_id] == "given up, not yet failed"
    ((entry,),) = in_rows(data_dir, select(AuditRow).where(AuditRow.event.startswith("request_")))
    assert (entry.event, entry.actor, entry.owner) == ("request_given_up", "operator", "alice")
    assert entry.details["request_id"] == request_id
    assert entry.details["reason"] == "it ends the server"


def test_nothing_is_given_up_before_it_is_confirmed(run, ids):
    asked = run("fail", ids["optim_step", 2])
    assert asked.code == 1
    assert "Give it up?" in asked.out + asked.err
    assert all(each["state"] == "unfinished" for each in json.loads(run("list", "--json").out))


def test_what_has_an_outcome_keeps_it(run, ids):
    for key, state in ((("create_model", 0), "finished"), (("sample", 0), "failed")):
        again = run("fail", ids[key], "--yes")
        assert again.code == 2
        assert f"has an outcome already ({state}), and nothing is to be done" in again.err
    assert "--refuse-model gives up its model" in run("fail", ids["create_model", 0], "--yes").err
    assert "--refuse-model" not in run("fail", ids["sample", 0], "--yes").err


def test_a_model_is_given_up_for_an_executed_request_only(run, ids, data_dir):
    for key in (("optim_step", 2), ("sample", 0)):
        refused = run("fail", ids[key], "--refuse-model", "--yes")
        assert (refused.code, "is not run again to restore a model" in refused.err) == (2, True)
    given_up = run("fail", ids["create_model", 0], "--refuse-model", "--reason", "it hangs", "--yes")
    assert given_up.code == 0
    assert "request 0 of alice-1:train:0 is not run again" in given_up.out
    assert (
        json.loads(run("show", ids["create_model", 0], "--json").out)["state"]
        == "finished, its model given up"
    )
    ((row,),) = in_rows(data_dir, select(AuditRow).where(AuditRow.event == "request_never_again"))
    assert row.details["model_id"] == "alice-1:train:0"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["show", "0123456789abcdef" * 2], "there is no request '0123456789abcdef"),
        (["fail", "x%", "--yes"], "there is no request 'x%'"),
        (["show", ""], "there is no request ''"),
        (["fail", "00", "--reason", "a\nb"], "--reason is 'a\\nb'"),
        (["fail", "00", "--reason", "a" * 501], "at most 500 characters"),
    ],
)
def test_what_cannot_be_done_is_named(run, arguments, complaint):
    result = run(*arguments)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert complaint in result.err


def test_a_beginning_that_two_ids_have_is_not_enough(run, data_dir):
    for number, end in enumerate("ab", start=2):
        new_id = update(RequestRow).where(RequestRow.number == number).values(id="12345" + end)
        in_rows(data_dir, new_id)
    assert "more than one request begins with '12345'" in run("show", "12345").err
    assert run("show", "12345a").code == 0


def test_a_directory_that_is_not_there_has_no_requests(run, tmp_path):
    for arguments in (["list"], ["show", "00"], ["fail", "00"]):
        result = run(*arguments, data_dir=tmp_path / "typo")
        assert (result.code, "there is no database" in result.err) == (2, True)
    assert not (tmp_path / "typo").exists()
