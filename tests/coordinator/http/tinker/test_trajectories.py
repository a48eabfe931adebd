"""Agents sample below a base URL, and whoever runs them gets the turns: a tree, rewards, sequences, keys."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from sqlalchemy import select, update

from spmd_tx.coordinator.http.text_generation import prompts as prompts_module
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.retention.reaper import Reaper
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import TrajectoryRow, TurnRow
from tests.coordinator.http.fake_scheduler import DRAWN_TOKEN, LOGPROB

BASE_MODEL = "Qwen/Qwen3-0.6B"
HELLO = {"role": "user", "content": "Hi"}
DAY = 24 * 3600.0

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


async def chat(client, name="run-1", messages=(HELLO,), **more):
    body = {"model": BASE_MODEL, "messages": list(messages), "max_tokens": 3} | more
    return await client.post(f"http://server/oai/api/in/{name}/v1/chat/completions", json=body)


async def say(client, name="run-1", messages=(HELLO,), **more):
    answer = (await chat(client, name, messages, **more)).raise_for_status().json()
    return answer["choices"][0]["message"]


async def listed(client, **query):
    return (await client.get("trajectories", params=query)).raise_for_status().json()["trajectories"]


async def tree(client, **query):
    (entry,) = await listed(client)
    return (await client.get(f"trajectories/{entry['id']}", params=query)).raise_for_status().json()


async def sequences(client, **asked):
    return (await client.post("trajectories/sequences", json=asked)).raise_for_status().json()["segments"]


def later(message, content="And?"):
    return [HELLO, message, {"role": "user", "content": content}]


async def prompts(services):
    """The tokens of the prompts that have arrived."""
    bodies = [
        json.loads(await services.queue.payload(each))
        for each in services.scheduler.arrived
        if each.kind == "sample"
    ]
    return [body["prompt"]["chunks"][0]["tokens"] for body in bodies]


async def test_the_second_turn_goes_on_from_the_tokens_of_the_first(api, services):
    message = await say(api)
    await say(api, messages=later(message))
    first, second = await prompts(services)
    assert second[: len(first) + 3] == [*first, *[DRAWN_TOKEN] * 3]
    entry = (shown := await tree(api))["trajectory"]
    one, two = shown["turns"]
    assert (one["parent"], one["cause"], one["state"]) == (None, "first", "sampled")
    assert (two["parent"], two["cause"], two["cause_message"]) == (one["id"], "continues", None)
    assert [each["text"] for each in two["new_messages"]] == ["And?"]
    assert (two["reused_tokens"], two["new_tokens"]) == (len(first) + 3, len(second) - len(first) - 3)
    assert (entry["name"], entry["turns"], entry["roots"], entry["sampled_tokens"]) == ("run-1", 2, 1, 6)
    assert (entry["prompt_tokens"], entry["reused_tokens"]) == (len(first) + len(second), len(first) + 3)


async def in_messages(client, messages):
    """Ask Anthropic's way, and return the conversation with the answer."""
    body = {"model": BASE_MODEL, "max_tokens": 3, "messages": messages}
    answer = await client.post("http://server/anthropic/api/in/run-1/v1/messages", json=body)
    return [*messages, {"role": "assistant", "content": answer.raise_for_status().json()["content"]}]


async def in_responses(client, items):
    body = {"model": BASE_MODEL, "max_output_tokens": 3, "input": items}
    answer = await client.post("http://server/oai/api/in/run-1/v1/responses", json=body)
    return [*items, *answer.raise_for_status().json()["output"]]


@pytest.mark.parametrize(("ask", "dialect"), [(in_messages, "messages"), (in_responses, "responses")])
async def test_the_other_dialects_are_kept_too(api, services, ask, dialect):
    said = await ask(api, [HELLO])
    await ask(api, [*said, {"role": "user", "content": "And?"}])
    first, second = await prompts(services)
    assert second[: len(first) + 3] == [*first, *[DRAWN_TOKEN] * 3]
    one, two = (await tree(api))["turns"]
    assert (two["parent"], two["cause"], two["dialect"]) == (one["id"], "continues", dialect)


async def test_a_turn_goes_on_in_another_dialect(api, services):
    said = await in_messages(api, [HELLO])
    await say(api, messages=later({"role": "assistant", "content": said[1]["content"][0]["text"]}))
    one, two = (await tree(api))["turns"]
    assert two["parent"] == one["id"]


async def test_a_call_without_a_trajectory_goes_on_from_its_tokens_too(api, services):
    body = {"model": BASE_MODEL, "messages": [HELLO], "max_tokens": 3}
    url = "http://server/oai/api/v1/chat/completions"
    message = (await api.post(url, json=body)).json()["choices"][0]["message"]
    await api.post(url, json=body | {"messages": later(message)})
    first, second = await prompts(services)
    assert second[: len(first) + 3] == [*first, *[DRAWN_TOKEN] * 3]
    assert await listed(api) == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tree_is_read_again_from_the_log(api, services, is_streamed):
    answer = await chat(api, stream=is_streamed)
    message = {
        "role": "assistant",
        "content": "" if is_streamed else answer.json()["choices"][0]["message"]["content"],
    }
    if is_streamed:
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        message["content"] = "".join(each["choices"][0]["delta"].get("content", "") for each in events)
    (entry,) = await listed(api)
    services.trajectories.trees.forget(entry["id"])
    await say(api, messages=later(message))
    first, second = await prompts(services)
    assert second[: len(first) + 3] == [*first, *[DRAWN_TOKEN] * 3]


async def test_branches_say_why(api):
    message = await say(api)
    await say(api, messages=later(message))
    await say(api, messages=later(message))
    await say(api, messages=later(message, "Why?"))
    await say(api, messages=[{"role": "user", "content": "Other"}])
    turns = (await tree(api))["turns"]
    assert [(each["cause"], each["cause_message"]) for each in turns] == [
        ("first", None),
        ("continues", None),
        ("retry", None),
        ("edited", 2),
        ("new", None),
    ]
    assert len({each["parent"] for each in turns[1:4]}) == 1


async def test_sequences_have_tokens_with_masks_and_where_they_are_from(api, services):
    message = await say(api)
    await say(api, messages=later(message))
    first, second = await prompts(services)
    (segment,) = await sequences(api, name="run")
    assert segment["tokens"] == [*second, *[DRAWN_TOKEN] * 3]
    new = len(second) - len(first) - 3
    assert segment["sampled"] == [False] * len(first) + [True] * 3 + [False] * new + [True] * 3
    wanted = [0.0] * len(first) + [LOGPROB] * 3 + [0.0] * new + [LOGPROB] * 3
    assert segment["logprobs"] == pytest.approx(wanted)
    one, two = (turn["id"] for turn in segment["turns"])
    assert segment["spans"] == [
        [one, "prompt", 0, len(first)],
        [one, "sampled", 0, 3],
        [two, "prompt", len(first) + 3, new],
        [two, "sampled", 0, 3],
    ]
    assert [turn["start"] for turn in segment["turns"]] == [len(first), len(second)]


async def test_a_shared_turn_trains_once_and_superseded_leaves_not_at_all(api):
    message = await say(api)
    for content in ("And?", "And?", "Why?"):
        await say(api, messages=later(message, content))
    (entry,) = await listed(api)
    kept, everything, last = [
        await sequences(api, ids=[entry["id"]], leaves=leaves) for leaves in ("kept", "all", "last")
    ]
    assert [len(each) for each in (kept, everything, last)] == [1, 3, 1]
    assert kept == last
    trains = [[turn["trains"] for turn in segment["turns"]] for segment in everything]
    assert trains == [[True, True], [False, True], [False, True]]
    assert [sum(segment["sampled"]) for segment in everything] == [6, 3, 3]


async def test_the_samples_of_one_request_are_all_kept(api):
    await chat(api, n=4)
    (entry,) = await listed(api)
    assert [turn["id"][-2:] for turn in (await tree(api))["turns"]] == [":0", ":1", ":2", ":3"]
    assert len(await sequences(api, ids=[entry["id"]])) == 4


async def test_turns_and_trajectories_are_rewarded(api):
    await say(api)
    shown = await tree(api)
    address, turn = f"trajectories/{shown['trajectory']['id']}/rewards", shown["turns"][0]["id"]
    for reward in (0.5, 1.0):
        (await api.post(address, json={"reward": reward, "turn": turn})).raise_for_status()
    (await api.post(address, json={"reward": 2.0, "metrics": {"steps": 3}})).raise_for_status()
    shown = await tree(api, tokens=True)
    assert shown["turns"][0]["reward"] == 1.0
    assert (shown["trajectory"]["reward"], shown["trajectory"]["metrics"]) == (2.0, {"steps": 3})
    assert shown["turns"][0]["logprobs"] == pytest.approx([LOGPROB] * 3)
    assert "".join(shown["turns"][0]["tokens"]) == shown["turns"][0]["message"]["text"]
    (segment,) = await sequences(api, name="run-1")
    assert (segment["reward"], segment["turns"][0]["reward"]) == (2.0, 1.0)


@pytest.mark.parametrize("turn", ["x", "x:0", ":", "0" * 32 + ":0", "é:٣"])
async def test_a_reward_of_no_turn_is_refused(api, turn):
    await say(api)
    (entry,) = await listed(api)
    answer = await api.post(f"trajectories/{entry['id']}/rewards", json={"reward": 1, "turn": turn})
    assert answer.status_code == 400
    assert "has no turn" in answer.json()["detail"]


async def test_a_finished_trajectory_takes_no_more_turns(api):
    await say(api)
    (entry,) = await listed(api, state="open")
    for _ in range(2):
        (await api.post(f"trajectories/{entry['id']}/finish")).raise_for_status()
    answer = await chat(api)
    assert (answer.status_code, "is finished" in answer.text) == (400, True)
    assert await listed(api, state="open") == []
    (await api.delete(f"trajectories/{entry['id']}")).raise_for_status()
    await say(api)
    assert (await tree(api))["trajectory"]["turns"] == 1


async def test_what_a_trajectory_is_made_with_counts_where_a_call_says_nothing(api, services):
    made = {"name": "run-1", "model": BASE_MODEL, "settings": {"temperature": 0.5, "max_tokens": 2}}
    (await api.post("trajectories", json=made)).raise_for_status()
    await say(api, model="any-name", max_tokens=None)
    body = json.loads(await services.queue.payload(services.scheduler.arrived[0]))
    assert (body["sampling_params"]["temperature"], body["sampling_params"]["max_tokens"]) == (0.5, 2)
    assert (await api.post("trajectories", json=made)).status_code == 400
    odd = await api.post("trajectories", json={"settings": {"history": "forget"}})
    assert (odd.status_code, "history" in odd.text) == (400, True)
    unknown = await api.post("trajectories", json={"model": "unknown"})
    assert unknown.status_code == 404


@pytest.mark.parametrize("history", [None, "keep"])
async def test_a_trajectory_may_keep_its_history(api, monkeypatch, history):
    seen, made = [], {"name": "run-1", "settings": {"history": history}}
    maker = prompts_module.PromptMaker
    monkeypatch.setattr(
        prompts_module, "PromptMaker", lambda *parts, **how: seen.append(how) or maker(*parts, **how)
    )
    (await api.post("trajectories", json=made)).raise_for_status()
    await say(api)
    assert seen == [{"keeps_history": history is not None}]


@pytest.mark.parametrize("name", ["a%20b", "%C3%A9", "-a", "x" * 129, "a%2Fb", "a%00"])
async def test_odd_names_are_refused(api, name):
    assert (await chat(api, name)).status_code in (400, 404)
    assert await listed(api) == []


async def test_a_beginning_longer_than_any_name_is_refused(api):
    """SQLite compares no pattern of 50,000 bytes."""
    await say(api, "a" * 128)
    assert [each["name"] for each in await listed(api, name="a" * 128)] == ["a" * 128]
    for answer in (
        await api.get("trajectories", params={"name": "a" * 50_000}),
        await api.get("trajectories", params={"search": "a" * 50_000}),
        await api.post("trajectories/sequences", json={"name": "a" * 70_000}),
    ):
        assert answer.status_code == 400
        assert "at most 128" in answer.json()["error"]


@pytest.mark.parametrize(("limit", "turns"), [("turns_per_trajectory", 2), ("trajectory_bytes", 1)])
async def test_limits_are_named(api, services, limit, turns):
    services.trajectories.bounds = services.config.bounds.__class__(
        **{limit: 2 if limit == "turns_per_trajectory" else 64 << 10}
    )
    if limit == "trajectory_bytes":
        await say(api)
        async with services.database.transaction() as db:
            await db.execute(update(TrajectoryRow).values(size_bytes=64 << 10))
    else:
        for _ in range(turns):
            await say(api)
    answer = await chat(api)
    assert (answer.status_code, limit in answer.text) == (400, True)


async def test_an_owner_has_so_many_trajectories(api, services):
    services.trajectories.bounds = services.config.bounds.__class__(trajectories=2)
    for name in ("a", "b"):
        await say(api, name)
    answer = await chat(api, "c")
    assert (answer.status_code, "limit trajectories" in answer.text) == (400, True)
    await say(api, "a")


async def test_a_key_of_a_trajectory_can_only_sample_in_it(client_for, app):
    alice = await client_for("alice")
    await say(alice)
    (entry,) = await listed(alice)
    made = (await alice.post(f"trajectories/{entry['id']}/keys", json={})).raise_for_status().json()
    assert made["base_urls"]["openai"] == f"http://server/oai/api/in/{entry['id']}/v1"
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport,
        base_url="http://server/api/v1/",
        headers={"authorization": f"Bearer {made['key']}"},
    ) as agent:
        await say(agent)
        await say(agent, entry["id"])
        assert (await chat(agent, "other")).status_code == 403
        for method, path in (("GET", "trajectories"), ("POST", "create_session"), ("GET", "sessions")):
            assert (await agent.request(method, path, json={})).status_code == 403
        (await alice.delete(f"trajectories/{entry['id']}")).raise_for_status()
        assert (await chat(agent, entry["id"])).status_code == 403
        agent.headers["authorization"] = f"Bearer {made['key'][:-6]}AAAAAA"
        assert (await chat(agent, entry["id"])).status_code == 401


async def test_a_key_of_a_trajectory_ends_with_the_key_that_made_it(client_for):
    alice = await client_for("alice")
    await client_for("bob")
    await say(alice)
    (entry,) = await listed(alice)
    address = f"trajectories/{entry['id']}/keys"
    key = (await alice.post(address, json={})).json()["key"]
    agent = await client_for("carol")
    agent.headers["x-api-key"] = key
    await say(agent)
    (await alice.delete("auth/apikey/me")).raise_for_status()
    assert (await chat(agent)).status_code in (401, 403)


async def test_trajectories_are_their_owners(client_for):
    alice, mallory = await client_for("alice"), await client_for("mallory")
    message = await say(alice)
    await say(mallory, messages=later(message))
    (hers,), (his,) = await listed(alice), await listed(mallory)
    assert hers["id"] != his["id"]
    assert (await tree(mallory))["turns"][0]["parent"] is None
    answer = await mallory.post("trajectories/sequences", json={"ids": [his["id"], hers["id"]]})
    assert answer.status_code == 404
    assert await sequences(mallory, name="run-1") == await sequences(mallory, ids=[his["id"]])


async def test_pages_lead_on(api, services, monkeypatch):
    monkeypatch.setattr("spmd_tx.coordinator.http.tinker.trajectories.PAGE", 2)
    for number in range(5):
        await say(api, f"run-{number}")
    names, cursor = [], None
    while True:
        query = {"name": "run-"} | ({"cursor": cursor} if cursor else {})
        page = (await api.get("trajectories", params=query)).json()
        names += [each["name"] for each in page["trajectories"]]
        cursor = page["cursor"]
        if cursor is None:
            break
    assert names == [f"run-{number}" for number in reversed(range(5))]
    assert [each["name"] for each in await sequences(api, name="run-")] == names
    assert (await api.get("trajectories", params={"cursor": "x"})).status_code == 400
    assert (await api.post("trajectories/sequences", json={})).status_code == 400


async def test_what_is_unused_for_long_is_deleted_with_its_turns(api, services, tmp_path):
    await say(api, "old")
    await say(api, "new")
    old = TrajectoryRow.name == "old"
    async with services.database.transaction() as db:
        await db.execute(update(TrajectoryRow).where(old).values(used_at=clock.now() - 8 * DAY))
    reaper = Reaper(services.database, tmp_path, services.config)
    await reaper.reap(clock.now(), at_rest=True)
    assert [each["name"] for each in await listed(api)] == ["new"]
    async with services.database.reading() as db:
        assert len((await db.scalars(select(TurnRow))).all()) == 1


async def test_a_turn_whose_client_hangs_up_is_kept_as_far_as_it_was_drawn(api, services):
    services.scheduler.is_paused = True
    answering = asyncio.create_task(chat(api, stream=True))
    while not services.scheduler.arrived:
        await asyncio.sleep(0.01)
    request_id = services.scheduler.arrived[0].id
    while request_id not in services.progress._watches:
        await asyncio.sleep(0.01)
    job = SimpleNamespace(request_id=request_id)
    sample = SimpleNamespace(
        job=job,
        index=0,
        tokens=[5, 6],
        logprobs=[-1.0, -2.0],
        stop_reason=None,
        top_of=lambda *_: None,
        forced=(),
    )
    services.progress.hear(sample)
    await asyncio.sleep(0.05)
    answering.cancel()
    await asyncio.wait([answering])
    services.queue.resolve(request_id, Failed("the sample was cancelled by its client", "user"))
    await services.queue.flush()
    await services.trajectories.close()
    (turn,) = (await tree(api))["turns"]
    assert (turn["state"], turn["sampled_tokens"]) == ("cut", 2)
    async with services.database.reading() as db:
        row = (await db.scalars(select(TurnRow))).one()
    assert (await listed(api))[0]["size_bytes"] == len(row.prompt) + len(row.samples)
    (segment,) = await sequences(api, name="run-1")
    assert segment["tokens"][-2:] == [5, 6]
    services.scheduler.is_paused = False
    text = {"role": "assistant", "content": turn["message"]["text"]}
    answer = asyncio.create_task(chat(api, messages=later(text)))
    await answer
    assert (await tree(api))["turns"][1]["parent"] == turn["id"]


async def test_a_failed_turn_is_noted(api, services):
    services.scheduler.is_paused = True
    answering = asyncio.create_task(chat(api))
    while not services.scheduler.arrived:
        await asyncio.sleep(0.01)
    services.queue.resolve(services.scheduler.arrived[0].id, Failed("no", "server"))
    assert (await answering).status_code == 500
    (turn,) = (await tree(api))["turns"]
    assert (turn["state"], turn["message"]) == ("failed", None)


async def test_a_thousand_branches_move_nothing_else(api, services):
    """They are siblings of the same words, and a neighbour's call is served as before."""
    await chat(api, n=128)
    message = await say(api, "neighbour")
    for number in range(3):
        await chat(api, messages=later(message, str(number)), n=128)
    await say(api, "neighbour", messages=later(message))
    assert len((await tree_of(api, "run-1"))["turns"]) == 4 * 128
    assert (await tree_of(api, "neighbour"))["turns"][1]["cause"] == "continues"


async def tree_of(client, name):
    (entry,) = await listed(client, name=name)
    return (await client.get(f"trajectories/{entry['id']}")).raise_for_status().json()
