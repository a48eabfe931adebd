"""Lists of trajectories are searched, ordered and paged by the server, and trees are read in parts."""

import pytest

from spmd_tx.coordinator.http.tinker import trajectories
from spmd_tx.coordinator.wire.page_room import PageRoom
from tests.coordinator.http.tinker.test_trajectories import HELLO, later, listed, say, tree

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
async def agents(api, monkeypatch):
    """Five trajectories, of one to three turns; the last two have no reward."""
    monkeypatch.setattr("spmd_tx.coordinator.http.tinker.trajectories.PAGE", 2)
    for name, turns in (("Bee", 2), ("ant", 3), ("cat", 1), ("dog", 1), ("ant-2", 1)):
        for _ in range(turns):
            await say(api, name)
    for name, value in (("Bee", -1.5), ("ant", 0.0), ("cat", 2.0)):
        (entry,) = [each for each in await listed(api, search=name) if each["name"] == name]
        await api.post(f"trajectories/{entry['id']}/rewards", json={"reward": value})
    return api


async def names(client, **query):
    """Return the names of all pages."""
    found, cursor = [], None
    while True:
        asked = query | ({} if cursor is None else {"cursor": cursor})
        page = (await client.get("trajectories", params=asked)).raise_for_status().json()
        found += [each["name"] for each in page["trajectories"]]
        cursor = page["cursor"]
        if cursor is None:
            return found


async def test_every_order_goes_on_over_pages(agents):
    assert await names(agents) == ["ant-2", "dog", "cat", "ant", "Bee"]
    assert await names(agents, ascending=True) == ["Bee", "ant", "cat", "dog", "ant-2"]
    assert await names(agents, sort="name", ascending=True) == ["Bee", "ant", "ant-2", "cat", "dog"]
    assert (await names(agents, sort="turns"))[:2] == ["ant", "Bee"]
    assert (await names(agents, sort="size"))[0] == "ant"
    assert (await names(agents, sort="used"))[0] == "cat"


@pytest.mark.parametrize("ascending", [False, True])
async def test_those_without_a_reward_are_the_last(agents, ascending):
    found = await names(agents, sort="reward", ascending=ascending)
    rewarded = ["Bee", "ant", "cat"] if ascending else ["cat", "ant", "Bee"]
    assert (found[:3], set(found[3:])) == (rewarded, {"dog", "ant-2"})


async def test_a_search_finds_a_part_of_a_name(agents):
    assert await names(agents, search="NT") == ["ant-2", "ant"]
    assert await names(agents, search="%") == []


async def test_a_cursor_of_another_order_is_refused(agents):
    page = (await agents.get("trajectories", params={"sort": "name"})).json()
    answer = await agents.get("trajectories", params={"sort": "turns", "cursor": page["cursor"]})
    assert (answer.status_code, "with its sort" in answer.json()["detail"]) == (400, True)


async def test_branches_are_turns_that_nothing_goes_on_from(api):
    message = await say(api)
    for text in ("And?", "Why?", "Why?"):
        await say(api, messages=later(message, text))
    (entry,) = await listed(api)
    assert (entry["turns"], entry["roots"], entry["branches"]) == (4, 1, 3)


async def test_an_outline_has_the_tree_without_what_was_said(api):
    message = await say(api)
    await say(api, messages=later(message))
    whole, outline = (await tree(api))["turns"], (await tree(api, outline=True))["turns"]
    assert [each["new_messages"] for each in outline] == [[], []]
    said = ("new_messages", "message", "status", "stop_reason")
    for one, other in zip(whole, outline, strict=True):
        assert {name: value for name, value in one.items() if name not in said} == {
            name: value for name, value in other.items() if name not in said
        }


async def test_an_outline_has_the_samples_that_have_rewards_or_go_on(api):
    await say(api, n=3)
    (entry,) = await listed(api)
    two = f"{(await tree(api))['turns'][2]['id']}"
    await api.post(f"trajectories/{entry['id']}/rewards", json={"turn": two, "reward": 1.0})
    turns = (await tree(api, outline=True))["turns"]
    assert [(each["id"][-1], each["reward"]) for each in turns] == [("0", None), ("2", 1.0)]


async def test_turns_are_read_alone(api):
    message = await say(api)
    await say(api, messages=later(message))
    whole = (await tree(api, tokens=True))["turns"]
    request = whole[1]["id"].partition(":")[0]
    assert (await tree(api, tokens=True, turns_of=request))["turns"] == [whole[1]]
    assert (await tree(api, turns_of="unknown"))["turns"] == []


@pytest.mark.parametrize("at_once", [1, 2, 16])
async def test_a_tree_that_is_too_large_for_one_answer_is_read_in_pages(api, monkeypatch, at_once):
    message = await say(api)
    for text in ("And?", "Why?", "When?"):
        await say(api, messages=later(message, text), n=2)
    whole = await tree(api, tokens=True)
    assert whole["cursor"] is None
    monkeypatch.setattr(trajectories, "TURNS_AT_ONCE", at_once)
    monkeypatch.setattr(trajectories, "PageRoom", lambda most_bytes: PageRoom(1))
    pages = [await tree(api, tokens=True)]
    while pages[-1]["cursor"] is not None:
        pages.append(await tree(api, tokens=True, cursor=pages[-1]["cursor"]))
    assert [len(page["turns"]) for page in pages] == [1, 2, 2, 2]
    assert [turn for page in pages for turn in page["turns"]] == whole["turns"]


@pytest.mark.parametrize("cursor", ["x", "-1", "9" * 40, "\N{SUPERSCRIPT TWO}"])
async def test_a_cursor_of_no_page_is_refused(api, cursor):
    await say(api)
    (entry,) = await listed(api)
    answer = await api.get(f"trajectories/{entry['id']}", params={"cursor": cursor})
    assert (answer.status_code, "the page before" in answer.json()["detail"]) == (400, True)


async def test_so_many_turns_are_read_alone(api):
    await say(api, messages=[HELLO])
    (entry,) = await listed(api)
    answer = await api.get(f"trajectories/{entry['id']}", params={"turns_of": "x," * 50})
    assert (answer.status_code, "at most" in answer.json()["detail"]) == (400, True)
