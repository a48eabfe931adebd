import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.catalog import checkpoint_search, listings, session_search
from spmd_tx.coordinator.catalog.listings import ListingPage, SessionFilter
from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow, RequestRow, SamplerRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire.checkpoints import CheckpointSearchRequest
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.coordinator.wire.sessions import SessionSearchRequest

ALICE = Caller("alice", "user")
NOTES = {"notes": "x" * 40_000}
MOST = 100_000  # bytes: two of the entries
ADAPTER = {"rank": 8, "alpha": 8.0, "train_attn": True, "train_mlp": True, "train_unembed": True}


@pytest.fixture(autouse=True)
async def entries(database):
    """Five runs in sessions of their own, each with two checkpoints, all with long metadata."""
    async with database.transaction() as db:
        for number in range(5):
            about = {"created_at": float(number), "user_metadata": NOTES}
            db.add(SessionRow(id=f"s{number}", tags=[], owner="alice", **about))
            run = f"s{number}:train:0"
            db.add(ModelRow(id=run, session_id=f"s{number}", base_model="x", **ADAPTER, **about))
            for name in "ab":
                found = {"run_id": run, "kind": "weights", "name": name, "size_bytes": 1, "owner": "alice"}
                db.add(CheckpointRow(**found, **about))


async def pages(read):
    """Read all pages as the SDK's command line does: by what has come so far."""
    found, sizes = [], []
    while True:
        entries, cursor = await read(len(found))
        found += entries
        sizes.append(len(entries))
        assert cursor.offset + cursor.limit >= len(found)
        if len(found) == cursor.total_count:
            return found, sizes
        assert cursor.offset + cursor.limit == len(found), "the cursor says where to go on"


async def test_pages_of_runs_end_when_their_bytes_are_reached(database):
    async def read(offset):
        page = ListingPage(offset, 100)
        answer = await listings.training_runs(database, page, ALICE, SessionFilter(), PageRoom(3 * MOST))
        return answer.training_runs, answer.cursor

    found, sizes = await pages(read)
    assert [run.training_run_id for run in found] == [f"s{number}:train:0" for number in (4, 3, 2, 1, 0)]
    assert all(run.last_checkpoint.checkpoint_id == "weights/b" for run in found)
    assert max(sizes) <= 3  # each has the metadata of a checkpoint, too


async def test_a_page_that_holds_all_has_the_limit_that_was_asked_for(database):
    answer = await listings.training_runs(
        database, ListingPage(0, 20), ALICE, SessionFilter(), PageRoom(100 * MOST)
    )
    assert (len(answer.training_runs), answer.cursor.limit, answer.cursor.total_count) == (5, 20, 5)


async def test_a_run_has_the_time_of_its_newest_request(database):
    async with database.transaction() as db:
        for number, at in enumerate((1000.0, 2000.0)):
            row = {"id": f"r{number}", "kind": "optim_step", "line": "s0:train:0", "session_id": "s0"}
            db.add(RequestRow(number=number, seq_id=number, created_at=at, payload_length=0, **row))
    answer = await listings.training_runs(database, ListingPage(4, 1), ALICE, SessionFilter(), PageRoom(MOST))
    assert [run.last_request_time for run in answer.training_runs] == ["1970-01-01T00:33:20+00:00"]


async def test_pages_of_checkpoints_end_when_their_bytes_are_reached(database):
    async def read(offset):
        answer = await listings.checkpoints(database, ListingPage(offset, 1000), ALICE, PageRoom(MOST))
        return answer.checkpoints, answer.cursor

    found, sizes = await pages(read)
    assert (len({each.tinker_path for each in found}), max(sizes)) == (10, 2)


async def test_checkpoints_of_a_run_have_a_cursor_only_where_they_are_not_all(database):
    async def read(room, offset=0):
        return await listings.run_checkpoints(database, "s1:train:0", ALICE, offset, PageRoom(room))

    whole = await read(MOST)
    assert ([each.checkpoint_id for each in whole.checkpoints], whole.cursor) == (
        ["weights/b", "weights/a"],
        None,
    )
    first = await read(MOST // 2)
    assert (len(first.checkpoints), first.cursor.limit, first.cursor.total_count) == (1, 1, 2)
    rest = await read(MOST // 2, offset=1)
    assert first.checkpoints + rest.checkpoints == whole.checkpoints


async def test_a_session_with_many_samplers_is_read_in_parts(database):
    async with database.transaction() as db:
        for number in range(5):
            db.add(
                SamplerRow(
                    id=f"s1:sample:{number}", session_id="s1", base_model="x", created_at=float(number)
                )
            )
    row = SessionRow(id="s1", user_metadata=None, display_name=None)
    found, offset = [], 0
    while offset is not None:
        part = await listings.session(database, row, offset, 2)
        assert len(part.sampler_ids) <= 2
        assert part.training_run_ids == (["s1:train:0"] if offset == 0 else [])
        found += part.sampler_ids
        offset = part.next_offset
    assert found == [f"s1:sample:{number}" for number in range(5)]


SEARCHES = {
    "sessions": (session_search.search, SessionSearchRequest),
    "checkpoints": (checkpoint_search.search, CheckpointSearchRequest),
}


@pytest.mark.parametrize("kind, total", [("sessions", 5), ("checkpoints", 10)])
async def test_pages_of_a_search_end_when_their_bytes_are_reached(database, kind, total):
    search, request = SEARCHES[kind]
    found, cursor = [], None
    while True:
        answer = await search(database, request(cursor=cursor), ALICE, Bounds(answer_bytes=MOST))
        page = getattr(answer, kind)
        assert 0 < len(page) <= 2
        found += page
        cursor = answer.next_cursor
        if cursor is None:
            break
    assert len({repr(each) for each in found}) == total


@pytest.mark.parametrize("kind", SEARCHES)
async def test_a_search_that_takes_long_goes_on_with_the_next_page(database, kind):
    search, request = SEARCHES[kind]
    wanted = {"user_metadata": {"notes": "of none"}}
    pages, cursor = 0, None
    while True:
        answer = await search(database, request(cursor=cursor, **wanted), ALICE, Bounds(search_seconds=1e-9))
        assert getattr(answer, kind) == []
        pages, cursor = pages + 1, answer.next_cursor
        if cursor is None:
            break
    assert pages == {"sessions": 5, "checkpoints": 10}[kind]  # one is looked at in any case
