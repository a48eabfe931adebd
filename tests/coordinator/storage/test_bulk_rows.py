import pytest
from sqlalchemy import event, select

from spmd_tx.coordinator.requests import records
from spmd_tx.coordinator.storage import bulk_rows
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.coordinator.storage.tables import RequestRow
from tests.coordinator.conftest import run_queue
from tests.support.databases import make_database

MANY = bulk_rows.ROWS_AT_ONCE + 1


@pytest.fixture
async def table(database):
    """Many requests of two lines, of which all are known by number."""
    nothing = ("payload_file", "payload_offset", "payload_length", "losses", "losses_by_command", "executed")
    rows = [
        {
            **dict.fromkeys(nothing, 0),
            "executed": False,
            "number": number,
            "id": str(number),
            "kind": "sample",
            "line": f"s:{number % 2}",
            "seq_id": number // 2,
            "session_id": "s",
            "created_at": number / 3,
        }
        for number in range(MANY)
    ]
    await database.write(lambda db, aside: bulk_rows.insert(db, RequestRow, rows))
    return RequestRow


async def test_all_rows_are_written_and_those_that_are_wanted_are_found(database, table):
    keys = [(f"s:{number % 2}", number // 2) for number in range(MANY + 10)]
    found = await database.write(
        lambda db, aside: bulk_rows.find(db, table, ("line", "seq_id"), keys, ("number", "created_at"))
    )
    assert sorted(tuple(row) for row in found) == [(number, number / 3) for number in range(MANY)]


async def test_rows_are_changed_by_their_key_to_exactly_what_is_given(database, table):
    changes = [{"number": number, "finished_at": number / 7, "error": None} for number in range(1, MANY)]
    await database.write(lambda db, aside: bulk_rows.update(db, table, "number", changes))
    async with database.reading() as db:
        rows = await db.execute(select(RequestRow.finished_at).order_by(RequestRow.number))
        assert [at for (at,) in rows] == [None, *(number / 7 for number in range(1, MANY))]


@pytest.fixture
async def on_sqlite(tmp_path):
    make_database(tmp_path)
    database = await open_database(None, tmp_path)
    yield database
    await database.close()


async def test_no_statement_of_a_group_goes_through_all_requests(tmp_path, on_sqlite):
    """As the log grows, a request costs what it costs at first."""
    statements = []
    event.listen(on_sqlite._quick_writer, "before_cursor_execute", lambda *each: statements.append(each[2:4]))
    async with run_queue(on_sqlite, tmp_path) as queue:
        ids = [await queue.submit("optim_step", "s:train:0", number, "s", b"{}") for number in (1, 2)]
        queue.resolve(ids[0], records.Finished("application/json", b"{}"))
        await queue.flush()
    async with on_sqlite.reading() as db:
        for statement, values in statements:
            if "requests" in statement:
                plan = (
                    await (await db.connection()).exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
                ).all()
                assert not any("SCAN requests" in row[-1] for row in plan), (statement, plan)
    assert sum("requests" in statement for statement, _ in statements) >= 5
