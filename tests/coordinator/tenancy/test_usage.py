import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from spmd_tx.coordinator.requests.records import Failed, Finished
from spmd_tx.coordinator.storage.tables import AuditRow, ModelRow, SamplerRow, SessionRow, UsageRow
from spmd_tx.coordinator.tenancy import usage
from spmd_tx.coordinator.tenancy.spent import Usage
from spmd_tx.coordinator.tenancy.usage import HOUR_SECONDS, Item

NOW = 1_800_000_000.0  # a full hour
HOUR = int(NOW)


@pytest.fixture
async def rows(database):
    """A session of alice with a model, and samplers of it, of a checkpoint and of the base model."""
    adapter = {"rank": 1, "alpha": 1.0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    times = {"created_at": 1.0}
    samplers = {
        "own": ("s:train:0", None),
        "saved": (None, "tinker://x:train:1/sampler_weights/a"),
        "base": (None, None),
    }
    async with database.transaction() as db:
        db.add(SessionRow(id="s", tags=[], owner="alice", key_id="k", **times))
        db.add(ModelRow(id="s:train:0", session_id="s", base_model="b", **adapter, **times))
        for name, (model_id, path) in samplers.items():
            weights = {"base_model": "b", "model_id": model_id, "model_path": path}
            db.add(SamplerRow(id=name, session_id="s", **weights, **times))


async def add(database, *items, now=NOW):
    async with database.transaction() as db:
        await db.run_sync(usage.add, [Item(line, "s", spent) for line, spent in items], now)


async def used(database) -> dict[tuple[int, str], UsageRow]:
    async with database.reading() as db:
        return {
            ((row.hour - HOUR) // HOUR_SECONDS, row.line): row for row in await db.scalars(select(UsageRow))
        }


async def test_requests_are_added_up_by_the_hour(database, rows):
    one, two = Usage(trained=5), Usage(trained=7, checkpoints=1)
    await add(database, ("s:train:0", one), ("s:train:0", two))
    await add(database, ("s:train:0", one), now=NOW + HOUR_SECONDS - 0.001)
    await add(database, ("s:train:0", one), now=NOW + HOUR_SECONDS)
    found = await used(database)
    assert {key: (row.trained, row.checkpoints) for key, row in found.items()} == {
        (0, "s:train:0"): (17, 1),
        (1, "s:train:0"): (5, 0),
    }


async def test_what_spends_nothing_leaves_no_row(database, rows):
    await add(database, ("s:train:0", Usage()))
    assert await used(database) == {}


@pytest.mark.parametrize(
    "line, run", [("s:train:0", "s:train:0"), ("own", "s:train:0"), ("saved", "x:train:1"), ("base", None)]
)
async def test_usage_names_owner_key_and_run(database, rows, line, run):
    await add(database, (line, Usage(prompt=3, cached=2, sampled=4)))
    (row,) = (await used(database)).values()
    assert (row.owner, row.key_id, row.session_id, row.run_id, row.base_model) == (
        "alice",
        "k",
        "s",
        run,
        "b",
    )
    assert (row.prompt, row.cached, row.sampled) == (3, 2, 4)


async def finish(queue, seq_id, outcome, kind="forward_backward"):
    request_id = await queue.submit(kind, "s:train:0", seq_id, "s", b"{}")
    queue.resolve(request_id, outcome)
    assert await queue.wait(request_id, timeout=5) == outcome


async def test_a_request_is_counted_with_its_result_and_a_failed_one_is_not(database, rows, queue):
    await finish(queue, 1, Finished("x", b"", spent=Usage(trained=5)))
    await finish(queue, 2, Failed("wrong", "user"))
    ((_, row),) = (await used(database)).items()
    assert row.trained == 5


@pytest.mark.parametrize("happened", [False, True], ids=["not committed", "committed"])
async def test_a_commit_that_seems_to_fail_counts_once(database, rows, queue, monkeypatch, happened):
    """Whether it happened or not: the queue writes the same outcome again."""
    request_id = await queue.submit("save_weights", "s:train:0", 1, "s", b"{}")
    write, failures = database.write, iter([True])

    async def unsure(work):
        fails = next(failures, False)
        lost = OperationalError("commit", None, ConnectionError("lost"))

        def fail(db, aside):
            work(db, aside)
            raise lost

        written = await write(fail if fails and not happened else work)
        if fails:
            raise lost
        return written

    monkeypatch.setattr(database, "write", unsure)
    path = "tinker://s:train:0/weights/a"
    queue.resolve(request_id, Finished("x", b'{"path":"%s"}' % path.encode(), spent=Usage(trained=5)))
    assert await queue.wait(request_id, timeout=10) is not None
    ((_, row),) = (await used(database)).items()
    assert (row.trained, row.checkpoints) == (5, 1)
    async with database.reading() as db:
        (entry,) = await db.scalars(select(AuditRow))
    assert (entry.event, entry.actor, entry.key_id) == ("checkpoint_saved", "alice", "k")
    assert entry.details == {"session_id": "s", "tinker_path": path}
