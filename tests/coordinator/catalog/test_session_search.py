import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.catalog.searched_page import ROWS_AT_ONCE
from spmd_tx.coordinator.catalog.session_search import search
from spmd_tx.coordinator.storage.tables import SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire import sessions as schemas
from spmd_tx.coordinator.wire.sessions import SessionSearchRequest

ALICE = Caller("alice", "user")


@pytest.fixture
def add(database):
    async def add(*sessions: dict) -> None:
        async with database.transaction() as db:
            for session in sessions:
                db.add(SessionRow(**{"created_at": 1.0, "tags": [], "owner": "alice"} | session))

    return add


@pytest.fixture
def found(database):
    """The ids that a search gives."""

    async def found(caller=ALICE, **wish) -> list[str]:
        body = {"limit": 200, **wish}
        answer = await search(database, SessionSearchRequest(**body), caller, Bounds())
        return [session.session_id for session in answer.sessions]

    return found


async def pages(database, limit):
    cursor, seen = None, []
    while True:
        page = await search(database, SessionSearchRequest(limit=limit, cursor=cursor), ALICE, Bounds())
        seen.append([session.session_id for session in page.sessions])
        cursor = page.next_cursor
        if cursor is None:
            return seen


@pytest.mark.parametrize(
    "wish, expected",
    [
        ("GROSSE", ["name"]),
        ("große die", ["name"]),  # every word, anywhere
        ("große das", []),
        ("100%", ["percent"]),
        ("_", []),  # a letter as any other
    ],
)
async def test_names_are_compared_without_regard_to_case(add, found, wish, expected):
    await add({"id": "name", "display_name": "Die Große Zahl"}, {"id": "percent", "display_name": "100%"})
    assert await found(display_name=wish) == expected


async def test_a_session_that_is_named_by_its_id_or_by_its_name_is_found(add, found):
    await add({"id": "a", "display_name": "one"}, {"id": "b", "display_name": "two"}, {"id": "c"})
    assert await found(session_id="a", display_name="two") == ["b", "a"]
    assert await found(session_id="a") == ["a"]


@pytest.mark.parametrize("key", ["plain", 'quo"te', "do.t", "'", "$", "ö", ""])
async def test_metadata_must_be_equal_whatever_its_name_is(add, found, key):
    await add(
        {"id": "yes", "user_metadata": {key: "1", "other": "2"}},
        {"id": "no", "user_metadata": {key: "2"}},
        {"id": "none"},
    )
    assert await found(user_metadata={key: "1"}) == ["yes"]
    assert await found(user_metadata={key: "1", "other": "3"}) == []


async def test_metadata_that_is_no_text_is_found_as_json(add, found):
    await add({"id": "a", "user_metadata": {"rank": 8, "tags": ["x"]}})
    assert await found(user_metadata={"rank": "8", "tags": '["x"]'}) == ["a"]


async def test_the_status_is_what_became_of_the_session(add, database, found):
    await add(
        {"id": "active"},
        {"id": "done", "ended_at": 2.0, "finish_reason": "success"},
        {"id": "broken", "ended_at": 2.0, "finish_reason": "interrupted"},
        {"id": "silent", "ended_at": 2.0, "ended_because": "its client was silent for 1800 seconds"},
    )
    active, finished = schemas.ActiveQuery(), schemas.ClientFinishedQuery()
    assert await found(statuses=[active]) == ["active"]
    assert await found(statuses=[finished]) == ["done", "broken"]
    assert await found(statuses=[schemas.FailedQuery(), schemas.CancelledQuery()]) == []
    assert await found(statuses=[schemas.ClientFinishedQuery(["success"]), active]) == ["done", "active"]
    answer = await search(database, SessionSearchRequest(session_id="silent"), ALICE, Bounds())
    assert answer.sessions[0].status is None


async def test_owners_are_found_as_far_as_they_are_seen(add, found):
    await add({"id": "hers"}, {"id": "his", "owner": "bob"}, {"id": "theirs", "owner": "carol"})
    admin = Caller("root", "admin")
    everyone, some = schemas.AccessibleSearchOwner(), schemas.UserSearchOwner(["bob", "alice"])
    assert await found(owner=everyone) == ["hers"]
    assert await found(owner=some) == ["hers"]
    assert await found(admin) == []
    assert await found(admin, owner=everyone) == ["theirs", "his", "hers"]
    assert await found(admin, owner=some) == ["his", "hers"]


async def test_pages_miss_nothing_and_repeat_nothing(add, database):
    """Also of sessions that were created at the same time, or less than a microsecond apart."""
    times = [5.0, 5.0, 5.0, 5.0 + 1e-7, 5.0 + 2e-7, 6.123456789, 7.0]
    await add(*({"id": f"s{place}", "created_at": time} for place, time in enumerate(times)))
    newest_first = ["s6", "s5", "s4", "s3", "s2", "s1", "s0"]
    for limit in (1, 2, 3, 7):
        assert [id for page in await pages(database, limit) for id in page] == newest_first


async def test_a_needle_is_found_behind_many_others(add, found):
    await add({"id": "needle", "created_at": 0.5, "display_name": "needle"})
    await add(*({"id": f"{place:04}", "display_name": "hay"} for place in range(ROWS_AT_ONCE + 1)))
    assert await found(display_name="needle") == ["needle"]


async def test_a_page_that_is_full_to_the_last_session_is_the_last(add, database):
    await add({"id": "a"}, {"id": "b"})
    assert await pages(database, 2) == [["b", "a"]]
