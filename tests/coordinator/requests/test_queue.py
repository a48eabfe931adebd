import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import insert, select

from spmd_tx.coordinator.requests import queue as request_queue
from spmd_tx.coordinator.requests.queue import open_queue
from spmd_tx.coordinator.requests.records import Failed, Finished
from spmd_tx.coordinator.storage.tables import RequestRow, SamplerRow
from spmd_tx.errors import Abandoned, InvalidRequest, NotFound, StartError

RESULT = Finished("application/json", b'{"metrics": {}}')


CALLS = [(0, "create_model"), (1, "forward_backward"), (2, "optim_step")]


async def submit(queue, line="s:train:0", seq_id=1, kind="optim_step", payload=b"{}", **options):
    return await queue.submit(kind, line, seq_id, "s", payload, **options)


async def test_a_request_is_announced_once_with_its_payload(queue, arrivals):
    request_id = await submit(queue, seq_id=3, payload=b"body")
    (request,) = arrivals
    assert (request.id, request.kind, request.line, request.seq_id) == (
        request_id,
        "optim_step",
        "s:train:0",
        3,
    )
    assert await queue.payload(request) == b"body"


async def test_a_request_is_in_the_database_when_submit_returns(queue, database):
    request_id = await submit(queue)
    async with database.reading() as db:
        row = await db.scalar(select(RequestRow))
    assert row.id == request_id
    assert row.finished_at is None


async def test_the_same_key_again_is_the_same_request(queue, arrivals):
    first = await submit(queue, payload=b"1")
    second = await submit(queue, payload=b"2")
    assert first == second
    assert len(arrivals) == 1
    assert await queue.payload(arrivals[0]) == b"1"


async def test_the_same_key_twice_at_once_is_the_same_request(queue, arrivals):
    first, second = await asyncio.gather(submit(queue, payload=b"1"), submit(queue, payload=b"2"))
    assert first == second
    assert len(arrivals) == 1


async def test_lines_have_their_own_numbers(queue):
    assert await submit(queue, line="a") != await submit(queue, line="b")


async def test_a_number_that_is_used_for_something_else_is_refused(queue):
    await submit(queue, kind="optim_step")
    with pytest.raises(InvalidRequest, match="seq_id 1 of 's:train:0' was already used for optim_step"):
        await submit(queue, kind="forward_backward")


async def test_numbers_follow_the_order_of_arrival(queue, arrivals):
    await asyncio.gather(*(submit(queue, seq_id=seq_id) for seq_id in (3, 2, 1)))
    assert [request.seq_id for request in sorted(arrivals, key=lambda request: request.number)] == [3, 2, 1]


async def test_waiting_ends_with_the_outcome(queue):
    request_id = await submit(queue)
    waiting = [asyncio.create_task(queue.wait(request_id, timeout=30)) for _ in range(2)]
    await asyncio.sleep(0)
    queue.resolve(request_id, RESULT)
    assert await asyncio.gather(*waiting) == [RESULT, RESULT]


async def test_metrics_of_an_outcome_are_news(queue):
    for seq_id, outcome in enumerate(
        (RESULT, replace(RESULT, metrics={"loss:sum": 1.0}), Failed("no", "user"))
    ):
        request_id = await submit(queue, line=f"s:train:{seq_id}", seq_id=seq_id)
        queue.resolve(request_id, outcome)
        await queue.wait(request_id, timeout=30)
    assert queue.news.tell() == {"s:train:1"}


async def test_waiting_in_vain_gives_none(queue):
    assert await queue.wait(await submit(queue), timeout=0) is None


async def test_an_outcome_can_be_read_many_times(queue):
    request_id = await submit(queue)
    queue.resolve(request_id, RESULT)
    await queue.flush()
    assert [await queue.wait(request_id, timeout=0) for _ in range(3)] == [RESULT] * 3


async def test_the_first_outcome_counts(queue):
    request_id = await submit(queue)
    queue.resolve(request_id, RESULT)
    queue.resolve(request_id, Failed("late", "server"))
    await queue.flush()
    queue.resolve(request_id, Failed("later", "server"))
    await queue.flush()
    assert await queue.wait(request_id, timeout=0) == RESULT


async def test_an_unknown_request_is_not_found(queue):
    with pytest.raises(NotFound, match="'nobody'"):
        await queue.wait("nobody", timeout=0)


async def test_a_refused_request_is_recorded_but_not_announced(queue, arrivals):
    failure = Failed("its model is gone", "user")
    request_id = await submit(queue, refused=failure)
    assert arrivals == []
    assert await queue.wait(request_id, timeout=0) == failure
    assert await submit(queue) == request_id


async def test_other_rows_become_true_together_with_the_request(queue, database):
    row = {"id": "x", "session_id": "s", "base_model": "b", "created_at": 0.0}
    await asyncio.gather(*(submit(queue, also=[insert(SamplerRow).values(row)]) for _ in range(2)))
    async with database.reading() as db:
        assert await db.scalar(select(SamplerRow.id)) == "x"


async def test_a_submission_that_cannot_be_stored_is_refused_and_the_next_one_works(queue):
    row = insert(SamplerRow).values(id="x")  # lacks what must not be null
    with pytest.raises(Abandoned, match=r"internal error [0-9a-f]{12}: the server could not carry out"):
        await submit(queue, also=[row])
    await submit(queue)


async def test_an_outcome_is_stored_whatever_else_is_in_its_group(queue):
    request_id = await submit(queue)
    queue.resolve(request_id, RESULT)
    with pytest.raises(Abandoned):  # spoils the group that holds the outcome
        await submit(queue, seq_id=2, also=[insert(SamplerRow).values(id="x")])
    assert await queue.wait(request_id, timeout=30) == RESULT


@pytest.mark.parametrize("category, is_broken", [("server", True), ("user", False)])
async def test_a_request_that_the_server_gives_up_after_a_later_one_was_carried_out_breaks_its_model(
    queue, category, is_broken
):
    created, trained, stepped = [await submit(queue, seq_id=seq_id, kind=kind) for seq_id, kind in CALLS]
    for request_id in (created, stepped):
        queue.resolve(request_id, RESULT)
    await queue.flush()
    queue.resolve(trained, Failed("the server ended twice", category))
    await queue.flush()
    refusal = (await queue.history("s:train:0", after=-1)).refusal
    assert (refusal is not None and "request 1 is not run again" in refusal) == is_broken


async def test_a_client_that_hangs_up_does_not_stop_the_queue(queue, arrivals):
    hung_up = asyncio.create_task(submit(queue))
    await asyncio.sleep(0)
    hung_up.cancel()
    await submit(queue, seq_id=2)
    assert [request.seq_id for request in arrivals] == [1, 2]


async def test_results_survive_a_restart_and_unfinished_requests_wait_on(running_queue, database, tmp_path):
    async with running_queue(database, tmp_path) as queue:
        finished, failed, unfinished = [await submit(queue, seq_id=seq_id) for seq_id in (1, 2, 3)]
        queue.resolve(finished, RESULT)
        queue.resolve(failed, Failed("bad datum", "user"))
        await queue.flush()
    async with running_queue(database, tmp_path) as queue:
        assert await queue.wait(finished, timeout=0) == RESULT
        assert await queue.wait(failed, timeout=0) == Failed("bad datum", "user")
        assert [request.id for request in queue.unfinished()] == [unfinished]
        assert await queue.wait(unfinished, timeout=0) is None
        queue.resolve(unfinished, RESULT)
        assert await queue.wait(unfinished, timeout=10) == RESULT
        assert await submit(queue, seq_id=1) == finished
        assert await submit(queue, seq_id=4) not in (finished, failed, unfinished)


async def test_the_history_of_a_model_is_what_counts_and_what_is_closed(running_queue, database, tmp_path):
    async with running_queue(database, tmp_path) as queue:
        ids = [await submit(queue, seq_id=seq_id) for seq_id in range(5)]
        queue.resolve(ids[0], RESULT)
        queue.resolve(ids[1], Failed("bad datum", "user"))
        queue.resolve(ids[2], Failed("not finite", "user", executed=True))
        queue.resolve(ids[4], Finished("x", b"y", layout="1x2x3"))
        await queue.stored(ids[:3] + ids[4:])
        history = await queue.history("s:train:0", after=-1)
        assert [each.request.seq_id for each in history.executed] == [0, 2, 4]
        assert history.executed[2].layout == "1x2x3"
        assert history.executed[2].digest == Finished("x", b"y").digest
        assert (history.closed, history.refusal) == ({1}, None)
        assert [each.request.seq_id for each in (await queue.history("s:train:0", after=2)).executed] == [4]


async def test_losses_are_counted_over_restarts(running_queue, database, tmp_path):
    async with running_queue(database, tmp_path) as queue:
        ids = [await submit(queue, seq_id=seq_id) for seq_id in range(3)]
        await queue.count_losses(ids[:2], ids[:1])
    async with running_queue(database, tmp_path) as queue:
        assert await queue.count_losses(ids[:2], []) == {ids[0]: (2, 1), ids[1]: (2, 0)}


@pytest.mark.parametrize("body", [b"", b"in a row", b"in a file" * 1000])
async def test_bodies_are_read_from_disk_when_memory_has_forgotten_them(no_cache, queue, arrivals, body):
    request_id = await submit(queue, payload=body)
    assert await queue.payload(arrivals[0]) == body
    queue.resolve(request_id, Finished("x", body))
    await queue.flush()
    assert await queue.wait(request_id, timeout=10) == Finished("x", body)


async def test_what_comes_while_the_loop_goes_round_is_written_in_one_transaction(
    queue, database, monkeypatch
):
    monkeypatch.setattr(request_queue, "GATHER_SECONDS", 60.0)
    writes, write = [], database.write
    monkeypatch.setattr(database, "write", lambda work: writes.append(work) or write(work))

    async def submit_later(seq_id):
        for _ in range(seq_id):
            await asyncio.sleep(0)
        await submit(queue, seq_id=seq_id)

    await asyncio.gather(*(submit_later(seq_id) for seq_id in range(1, request_queue.GATHER_ROUNDS - 1)))
    assert len(writes) == 1


async def test_many_requests_at_once_share_files(queue, tmp_path):
    body = b"a large body" * 1000
    await asyncio.gather(*(submit(queue, seq_id=seq_id, payload=body) for seq_id in range(1, 101)))
    assert len(list((tmp_path / "payloads").glob("*.zst"))) in (1, 2)


async def test_two_servers_cannot_share_a_data_directory(queue, database, tmp_path):
    with pytest.raises(StartError, match="another running server"):
        await open_queue(database, tmp_path)
