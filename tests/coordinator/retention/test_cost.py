"""What a run of the reaper costs must not grow with what it leaves alone: the log waits meanwhile."""

import pytest
from sqlalchemy import text

from tests.coordinator.retention.contents import MODEL, add_model, add_sampler, add_session, add_snapshot

INSTRUCTIONS = 10  # of SQLite's virtual machine, between two calls of the counter
FEW, MANY = 500, 4000  # rows of each table
NUMBERS = "WITH RECURSIVE each (n) AS (SELECT :first UNION ALL SELECT n + 1 FROM each WHERE n < :last) "
ROWS = [
    "INSERT INTO requests (number, id, kind, line, seq_id, session_id, created_at, payload_length, "
    "finished_at, executed, losses, losses_by_command, coordinator_losses) SELECT n, 'r' || n, "
    "CASE n % 2 WHEN 0 THEN 'forward_backward' ELSE 'optim_step' END, :model, n, 's', :now, 1, :now, "
    "TRUE, 0, 0, 0 FROM each",
    "INSERT INTO requests (number, id, kind, line, seq_id, session_id, created_at, payload_length, "
    "finished_at, executed, losses, losses_by_command, coordinator_losses) SELECT 1000000 + n, 's' || n, "
    "'sample', 's:sample:0', n, 's', :now, 1, :now, TRUE, 0, 0, 0 FROM each",
    "INSERT INTO past_requests (number, kind, line, seq_id, session_id, created_at, finished_at) "
    "SELECT n, 'sample', 's:sample:0', n, 's', :now, :now FROM each",
    "INSERT INTO run_metrics (line, seq_id, kind, at, metrics) "
    "SELECT :model, n, 'optim_step', :now, '{}' FROM each",
    "INSERT INTO usage (hour, line, session_id, owner, trained, forwarded, prompt, cached, sampled, "
    "checkpoints) SELECT :now, 'm' || n, 's', '', 1, 1, 1, 1, 1, 1 FROM each",
    "INSERT INTO audit (at, event, actor, owner, details) SELECT :now, 'x', '', '', '{}' FROM each",
]


async def fill(database, now, first, last):
    values = {"first": first, "last": last, "now": now, "model": MODEL}
    async with database.transaction() as db:
        for rows in ROWS:
            insert, select = rows.split(" SELECT ", 1)
            statement = f"{insert} {NUMBERS} SELECT {select}"
            names = {name: value for name, value in values.items() if f":{name}" in statement}
            await db.execute(text(statement), names)


@pytest.fixture
async def instructions(database):
    """Count the instructions of SQLite's writing connection, in tens."""
    counted = [0]

    def count():
        counted[0] += 1
        return 0

    async with database.transaction() as db:
        connection = await (await db.connection()).get_raw_connection()
        await connection.driver_connection.set_progress_handler(count, INSTRUCTIONS)
    return counted


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # PostgreSQL does not count them
async def test_what_is_young_costs_nothing(database, tmp_path, reaper, now, instructions):
    await add_session(database)
    await add_model(database)
    for number in range(2):
        await add_sampler(database, number, created_at=number)
    for seq_id in (FEW // 2, FEW):
        await add_snapshot(database, tmp_path, seq_id)
    costs = []
    for first, last in ((0, FEW), (FEW + 1, MANY)):
        await fill(database, now, first, last)
        before = instructions[0]
        assert await reaper.reap(now) == []
        costs.append(instructions[0] - before)
    assert 0 < costs[1] < 2 * costs[0]
