import msgspec
import pytest
from sqlalchemy import func, select

from spmd_tx.coordinator.requests.records import Failed, Finished, NewOutcome, Request, RequestTimes
from spmd_tx.coordinator.requests.runs import metric_pages, run_metrics
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import RunMetrics
from spmd_tx.coordinator.wire.console.runs import LoggedPoint, MetricsPoint
from tests.coordinator.retention.contents import add_model

RUN, OTHER = "s:train:0", "t:train:0"


async def settle(database, *entries, line=RUN):
    """Store what requests have returned: (seq_id, kind, metrics)."""
    settled = [
        NewOutcome(
            Request(seq_id, f"{line}-{seq_id}", kind, line, seq_id, "s"),
            Failed("no", "user") if metrics is None else Finished("x", b"", metrics=metrics),
            RequestTimes(),
            seq_id,
        )
        for seq_id, kind, metrics in entries
    ]
    await database.write(lambda db, _: run_metrics.add(db, settled))


async def step(database, seq_id, loss=1.0, line=RUN):
    passed = seq_id, "forward_backward", {"loss:sum": loss, "num_datums:sum": 1.0}
    await settle(database, passed, (seq_id + 1, "optim_step", {"learning_rate:mean": 0.1}), line=line)


async def say(database, seq_id, values, step=None, line=RUN):
    async with database.transaction() as db:
        return await run_metrics.add_of_client(db, line, seq_id, step, values)


async def read(database, after=-1, limit=100, line=RUN, most_bytes=1 << 20):
    async with database.reading() as db:
        page = await metric_pages.points(db, line, after, limit, most_bytes)
    return [msgspec.json.decode(each, type=MetricsPoint) for each in page.entries], page.following


async def read_logged(database, after=-1, limit=100, most_bytes=1 << 20):
    async with database.reading() as db:
        page = await metric_pages.logged(db, RUN, after, limit, most_bytes)
    return [msgspec.json.decode(each, type=LoggedPoint) for each in page.entries], page.following


async def test_a_step_has_its_own_metrics_and_those_of_the_passes_before_it(database):
    await settle(
        database,
        (1, "forward_backward", {"loss:sum": 3.0, "kl:mean": 0.1, "num_datums:sum": 1.0}),
        (2, "forward_backward", {"loss:sum": 1.0, "kl:mean": 0.5, "num_datums:sum": 3.0}),
        (3, "forward", {}),
        (4, "optim_step", {"unclipped_grad_l2:mean": 2.0}),
        (5, "forward_backward", {"loss:sum": 9.0}),
        (6, "forward_backward", None),
    )
    await step(database, 1, line=OTHER)
    (point,), following = await read(database)
    assert (point.seq, point.step, following) == (4, 0, None)
    assert point.metrics == pytest.approx(
        {"loss:sum": 4.0, "kl:mean": 0.4, "num_datums:sum": 4.0, "unclipped_grad_l2:mean": 2.0}
    )


async def test_what_a_client_says_without_a_step_belongs_to_the_next_one(database):
    await step(database, 1)
    await say(database, 3, {"reward": 0.5})
    await step(database, 3)
    first, second = (await read(database))[0]
    assert "reward" not in first.metrics
    assert second.metrics["reward"] == 0.5


async def test_what_a_client_says_of_its_own_steps_stays_as_it_was_sent(database):
    for seq_id in (1, 3):
        await step(database, seq_id)
    sent = [(0, {"test/reward": 0.25}), (5000, {"reward": 0.1}), (1, {"reward": 0.75}), (1, {"kl": 0.5})]
    for number, values in sent:
        await say(database, 4, values, step=number)
    entries, following = await read_logged(database)
    assert ([(each.step, each.metrics) for each in entries], following) == (sent, None)
    assert all(
        not each.metrics.keys() & {"reward", "test/reward", "kl"} for each in (await read(database))[0]
    )


async def test_what_a_client_has_sent_is_read_in_pages(database):
    for number in range(5):
        await say(database, 1, {"reward": float(number)}, step=7)
    for limits in ({"limit": 2}, {"most_bytes": 20}):
        seen, after = [], -1
        while after is not None:
            page, after = await read_logged(database, after, **limits)
            assert 0 < len(page) <= 2
            seen += [each.metrics["reward"] for each in page]
        assert seen == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_a_page_of_steps_ends_when_its_bytes_are_reached(database):
    for number in range(4):
        await say(database, 2 * number, {"x" * 500: 1.0})
        await step(database, 1 + 2 * number)
    seen, after = [], -1
    while after is not None:
        page, after = await read(database, after, most_bytes=700)
        assert 0 < len(page) <= 2
        seen += [point.step for point in page]
    assert seen == [0, 1, 2, 3]


async def test_many_messages_about_the_next_step_are_one_row(database):
    await step(database, 1)
    for number in range(20):
        size = await say(database, 2, {"reward": float(number), f"metric {number % 3}": 1.0})
    rows = select(func.count()).select_from(RunMetrics).where(RunMetrics.kind == run_metrics.CLIENT)
    async with database.reading() as db:
        assert await db.scalar(rows) == 1
    assert size > len('{"reward": 19.0}')
    await step(database, 3)
    await say(database, 4, {"reward": 100.0})
    await step(database, 5)
    _, second, third = (await read(database))[0]
    assert (second.metrics["reward"], second.metrics["metric 2"]) == (19.0, 1.0)
    assert (third.metrics["reward"], third.metrics.get("metric 2")) == (100.0, None)


async def test_steps_are_read_in_pages_that_know_their_numbers(database):
    for number in range(5):
        await step(database, 1 + 2 * number, loss=float(number))
    seen, after = [], -1
    while after is not None:
        page, after = await read(database, after, limit=2)
        seen += [(point.step, point.metrics["loss:sum"]) for point in page]
    assert seen == [(number, float(number)) for number in range(5)]
    assert await read(database, after=10) == ([], None)


async def test_numbers_that_are_not_finite_are_null(database):
    await step(database, 1, loss=float("inf"))
    await say(database, 2, {"reward": float("nan")}, step=0)
    (point,), _ = await read(database)
    (logged,), _ = await read_logged(database)
    assert point.metrics["loss:sum"] is None
    assert logged.metrics["reward"] is None


async def test_a_list_shows_the_newest_value_of_each_metric(database):
    async with database.reading() as db:
        assert await run_metrics.summary(db, RUN) == (0, None, {}, [])
    await step(database, 1, loss=5.0)
    await say(database, 2, {"reward": 0.5})
    await step(database, 3, loss=4.0)
    async with database.reading() as db:
        found = await run_metrics.summary(db, RUN)
    assert (found.steps, found.last["loss:sum"], found.last["reward"]) == (2, 4.0, 0.5)


async def test_old_runs_are_thinned_and_very_old_rows_go(database, monkeypatch):
    monkeypatch.setattr(run_metrics, "THINNED_POINTS", 3)
    for run in (RUN, OTHER):
        await add_model(database, run)
    for number in range(9):
        await step(database, 1 + 2 * number, loss=float(number))
        await step(database, 1 + 2 * number, line=OTHER) if number < 4 else None
        await say(database, 2 + 2 * number, {"reward": 1.0}, step=10 * number)
        await say(database, 2 + 2 * number, {"kl": 1.0}, step=10 * number)
    async with database.transaction() as db:
        await run_metrics.forget(db, before=0.0, thin_before=0.0)
    assert len((await read(database))[0]) == 9
    async with database.transaction() as db:
        await run_metrics.forget(db, before=0.0, thin_before=clock.now() + 1)
    assert [point.metrics["loss:sum"] for point in (await read(database))[0]] == [2.0, 5.0, 8.0]
    left = [(each.step, *each.metrics) for each in (await read_logged(database))[0]]
    assert left == [(number, name) for number in (20, 50, 80) for name in ("reward", "kl")]
    await step(database, 19, loss=9.0)
    assert [point.step for point in (await read(database))[0]] == [2, 5, 8, 9]
    assert [point.step for point in (await read(database, after=18))[0]] == [9]
    assert len((await read(database, line=OTHER))[0]) == 4
    async with database.transaction() as db:
        await run_metrics.forget(db, before=clock.now() + 1, thin_before=0.0)
    assert await read(database) == ([], None)


async def test_what_a_client_says_between_two_looks_is_in_the_next(database):
    for number in range(3):
        await say(database, 2 * number, {"reward": float(number)})
        await step(database, 1 + 2 * number)
    whole, after, paged = await look(database, metric_pages.all_points, -1), -1, []
    assert [point.metrics.get("reward") for point in whole] == [0.0, 1.0, 2.0]
    for place, point in enumerate(whole):
        assert await look(database, metric_pages.all_points, point.seq) == whole[place + 1 :]
    while after is not None:
        page, after = await read(database, after, limit=1)
        paged += page
    assert paged == whole


async def test_all_that_a_client_has_sent_is_read_at_once(database):
    for number in range(3):
        await say(database, 1, {"reward": float(number)}, step=7)
    whole = await look(database, metric_pages.all_logged, -1)
    assert whole == (await read_logged(database))[0]
    assert await look(database, metric_pages.all_logged, whole[0].number) == whole[1:]


async def look(database, read_all, after):
    async with database.reading() as db:
        return [point async for piece in read_all(db, RUN, after) for point in piece]
