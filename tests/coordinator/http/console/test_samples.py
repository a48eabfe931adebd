import itertools

import pytest
from sqlalchemy import update

from spmd_tx.coordinator.http.console import samples
from spmd_tx.coordinator.requests.records import Finished, LearnedFacts, Request
from spmd_tx.coordinator.requests.runs import sample_bodies, sample_log
from spmd_tx.coordinator.requests.runs.sample_bodies import ShownSize
from spmd_tx.coordinator.storage.tables import RequestRow, RunMetrics
from tests.coordinator.http.console.test_timeline import BASE_MODEL, finished_step, sampler_of
from tests.coordinator.http.fake_scheduler import DRAWN_TOKEN, LOGPROB
from tests.coordinator.requests.runs.test_run_metrics import step


@pytest.fixture
def encode(tokenizer):
    return lambda text: tokenizer.encode(text).ids


class Sampling:
    """Samples with one client, whose requests have numbers of their own."""

    def __init__(self, api, session_id):
        self.api, self.session_id = api, session_id
        self._samplers, self._numbers = itertools.count(), itertools.count()

    async def sampler(self, **weights):
        return await sampler_of(self.api, self.session_id, next(self._samplers), **weights)

    async def sample(self, sampler, tokens, most=4, samples=1, **params):
        body = {
            "num_samples": samples,
            "prompt": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": most, **params},
            "sampling_session_id": sampler,
            "seq_id": next(self._numbers),
        }
        request_id = (await self.api.post("asample", json=body)).raise_for_status().json()["request_id"]
        await self.api.post("retrieve_future", json={"request_id": request_id})
        return request_id


@pytest.fixture
async def sampling(api, session_id):
    return Sampling(api, session_id)


@pytest.fixture
async def of_base(sampling):
    return await sampling.sampler(base_model=BASE_MODEL)


async def page(api, model_id, **query):
    answer = await api.get(f"http://server/console/api/runs/{model_id}/samples", params=query)
    return answer.raise_for_status().json()


async def group(api, model_id, request_id):
    answer = await api.get(f"http://server/console/api/runs/{model_id}/samples/{request_id}")
    return answer.raise_for_status().json()


async def test_samples_are_listed_as_text_newest_first(api, model_id, sampling, of_base, encode, tokenizer):
    first = await sampling.sample(of_base, encode("hello world"), samples=2, temperature=0.5)
    second = await sampling.sample(of_base, encode("and again"))
    found = await page(api, model_id)
    assert [each["id"] for each in found["requests"]] == [second, first]
    assert (found["looked_at"], found["next_start"], found["kept_hours"]) == (2, None, 2.0)
    _, shown = found["requests"]
    tokens = len(encode("hello world"))
    assert shown["prompt"] == {"text": "hello world", "tokens": tokens, "is_cut": False}
    answer = {"text": tokenizer.decode([DRAWN_TOKEN] * 4), "tokens": 4, "is_cut": False}
    sample = {"excerpt": answer, "stop_reason": "length", "mean_logprob": LOGPROB, "advantage": None}
    assert shown["samples"] == [sample] * 2
    assert (shown["num_samples"], shown["temperature"], shown["error"]) == (2, 0.5, None)
    assert (shown["weights"], shown["steps"]) == (None, None)


async def test_samples_have_the_advantage_that_their_run_was_trained_with(
    api, services, model_id, sampling, of_base
):
    request_id = await sampling.sample(of_base, [1, 2], samples=3)
    learned = LearnedFacts({request_id: {0: 0.75, 2: -0.25}})
    for line in (model_id, "another:train:0"):
        services.queue.rollouts.noted(Request(1, "r", "forward_backward", line, 1, "s"), outcome_of(learned))
        learned = LearnedFacts({request_id: {1: 9.0}})  # by who does not see the page
    (shown,) = (await page(api, model_id))["requests"]
    assert [each["advantage"] for each in shown["samples"]] == [0.75, None, -0.25]
    found = await group(api, model_id, request_id)
    assert [each["advantage"] for each in found["samples"]] == [0.75, None, -0.25]


def outcome_of(learned):
    return Finished("x", b"", rollouts=learned)


@pytest.fixture
def learn(services, model_id):
    def noted(**advantages):
        request = Request(1, "r", "forward_backward", model_id, 1, "s")
        services.queue.rollouts.noted(request, outcome_of(LearnedFacts(advantages)))

    return noted


async def test_the_order_by_advantage_is_one_of_all_samples_of_the_run(
    api, model_id, sampling, of_base, encode, learn, monkeypatch
):
    monkeypatch.setattr(sample_log, "IDS_AT_ONCE", 2)
    ids = [await sampling.sample(of_base, encode(text)) for text in ("hi", "hello", "world", "hello world")]
    best, middle, _, worst = ids
    learn(**{best: {0: 2.0}, "no longer kept": {0: 1.5}, middle: {0: 1.0}, worst: {0: -3.0}})

    async def in_order(order, **query):
        found, start = [], {}
        while start is not None:
            answer = await page(api, model_id, order=order, limit=1, **query, **start)
            found += [each["id"] for each in answer["requests"]]
            start = None if answer["next_start"] is None else {"start": answer["next_start"]}
        return found

    assert await in_order("highest") == [best, middle, worst]
    assert await in_order("lowest") == [worst, middle, best]
    assert await in_order("highest", search="hello") == [middle, worst]
    refused = await api.get(f"http://server/console/api/runs/{model_id}/samples", params={"order": "x"})
    assert refused.status_code == 400


async def test_answers_of_a_request_are_in_the_order_of_their_advantages(
    api, model_id, sampling, of_base, learn, monkeypatch
):
    monkeypatch.setattr(samples, "EXCERPT", ShownSize((0, 9), (9, 0), 2))
    request_id = await sampling.sample(of_base, [1, 2], samples=4)
    learn(**{request_id: {0: -1.0, 2: 0.5, 3: 0.75}})

    async def advantages(order):
        (shown,) = (await page(api, model_id, order=order))["requests"]
        return [each["advantage"] for each in shown["samples"]]

    assert await advantages("highest") == [0.75, 0.5]
    assert await advantages("lowest") == [-1.0, 0.5]
    assert await advantages("newest") == [-1.0, None]


async def test_a_prompt_is_followed_through_the_weights_of_a_run(
    api, model_id, sampling, of_base, encode, monkeypatch
):
    monkeypatch.setattr(samples, "MOST_LOOKED_AT", 2)
    first = await sampling.sample(of_base, encode("hello"))
    for text in ("hello there, all of you", "world", "olleh"):
        await sampling.sample(of_base, encode(text))
    last = await sampling.sample(await sampling.sampler(base_model=BASE_MODEL), encode("hello"), samples=2)
    found, start = [], {}
    while start is not None:
        answer = await page(api, model_id, prompt_of=first, **start)
        found += [each["id"] for each in answer["requests"]]
        start = None if answer["next_start"] is None else {"start": answer["next_start"]}
    assert found == [last, first]
    lost = await api.get(
        f"http://server/console/api/runs/{model_id}/samples", params={"prompt_of": "nothing"}
    )
    assert lost.status_code == 404


async def test_what_only_scores_a_prompt_is_no_sample(api, model_id, sampling, of_base):
    drawn = await sampling.sample(of_base, [1, 2])
    asked = {"model": of_base, "prompt": [1, 2, 3], "echo": True, "max_tokens": 0, "logprobs": 5}
    (await api.post("http://server/oai/api/v1/completions", json=asked)).raise_for_status()
    assert [each["id"] for each in (await page(api, model_id))["requests"]] == [drawn]


async def test_pages_follow_each_other(api, model_id, sampling, of_base):
    ids = [await sampling.sample(of_base, [number]) for number in range(3)]
    first = await page(api, model_id, limit=2)
    rest = await page(api, model_id, limit=2, start=first["next_start"])
    assert [each["id"] for each in first["requests"] + rest["requests"]] == ids[::-1]
    assert rest["next_start"] is None


async def test_samples_are_those_before_a_point_of_a_curve(api, services, model_id, sampling, of_base):
    early, late = [await sampling.sample(of_base, [1, 2]) for _ in range(2)]
    async with services.database.transaction() as db:
        for request, at in ((early, 50.0), (late, 150.0)):
            await db.execute(update(RequestRow).where(RequestRow.id == request).values(created_at=at))
        metrics = {"reward": 0.5}
        for step, at in ((7, 100.0), (8, 200.0)):
            row = {"line": model_id, "seq_id": 0, "kind": "client", "step": step, "at": at}
            db.add(RunMetrics(metrics=metrics, **row))

    async def found(**query):
        return [each["id"] for each in (await page(api, model_id, metric="reward", **query))["requests"]]

    assert await found(x=7) == [early]
    assert await found(x=8) == [late, early]
    assert await found(x=1000) == [late, early]  # the nearest point
    assert await found(axis="time", x=0) == [early]
    alone = await api.get(f"http://server/console/api/runs/{model_id}/samples", params={"metric": "reward"})
    assert alone.status_code == 400


async def test_a_search_looks_at_prompts_and_answers(api, model_id, sampling, of_base, encode, tokenizer):
    hello = await sampling.sample(of_base, encode("hello world"))
    other = await sampling.sample(of_base, encode("good night"))

    async def found(search):
        return [each["id"] for each in (await page(api, model_id, search=search))["requests"]]

    assert await found("WORLD") == [hello]
    assert await found("good night") == [other]
    assert await found(tokenizer.decode([DRAWN_TOKEN] * 2)) == [other, hello]
    assert await found("nothing of this") == []


async def test_a_search_goes_on_where_it_has_stopped(api, model_id, sampling, of_base, encode, monkeypatch):
    monkeypatch.setattr(samples, "MOST_LOOKED_AT", 2)
    wanted = await sampling.sample(of_base, encode("hello"))
    for _ in range(2):
        await sampling.sample(of_base, encode("other"))
    first = await page(api, model_id, search="hello")
    assert (first["requests"], first["looked_at"]) == ([], 2)
    rest = await page(api, model_id, search="hello", start=first["next_start"])
    assert [each["id"] for each in rest["requests"]] == [wanted]


async def test_requests_of_one_prompt_are_a_group(api, model_id, sampling, of_base, encode):
    hello, other = encode("hello"), encode("world")
    first = await sampling.sample(of_base, hello, samples=2, most=3, top_k=5)
    await sampling.sample(of_base, other)
    second = await sampling.sample(of_base, hello, most=2)
    elsewhere = await sampling.sampler(base_model=BASE_MODEL)
    await sampling.sample(elsewhere, hello)
    listed = {each["id"]: each["group"] for each in (await page(api, model_id))["requests"]}
    assert listed[first] == listed[second]
    assert len(set(listed.values())) == 3
    found = await group(api, model_id, first)
    assert [(each["request_id"], each["place"]) for each in found["samples"]] == [
        (first, 0),
        (first, 1),
        (second, 0),
    ]
    assert "".join(found["prompt"]["texts"]) == "hello"
    assert (found["max_tokens"], found["top_k"], found["temperature"]) == (3, 5, 1.0)
    assert found["model"] == BASE_MODEL
    content = found["samples"][0]["content"]
    assert (content["tokens"], content["logprobs"]) == ([DRAWN_TOKEN] * 3, [LOGPROB] * 3)
    assert len(content["texts"]) == 3


async def test_what_is_long_is_cut(api, model_id, sampling, of_base, monkeypatch):
    monkeypatch.setattr(samples, "WHOLE", ShownSize((2, 3), (1, 1), 2))
    monkeypatch.setattr(samples, "EXCERPT", ShownSize((0, 2), (1, 0), 1))
    request_id = await sampling.sample(of_base, [1, 2, 3, 4, 5, 6, 7], samples=3)
    (shown,) = (await page(api, model_id))["requests"]
    assert (shown["prompt"]["tokens"], shown["prompt"]["is_cut"], shown["num_samples"]) == (7, True, 3)
    (answer,) = shown["samples"]
    assert (answer["excerpt"]["tokens"], answer["excerpt"]["is_cut"]) == (4, True)
    found = await group(api, model_id, request_id)
    prompt = found["prompt"]
    assert (prompt["tokens"], prompt["left_out"], prompt["left_out_at"]) == ([1, 2, 5, 6, 7], 2, 2)
    contents = [(len(each["content"]["tokens"]), each["content"]["left_out"]) for each in found["samples"]]
    assert contents == [(2, 2)] * 2
    assert found["left_out"] == 1


async def test_a_run_has_the_samples_of_its_weights_wherever_they_are_drawn(
    api, model_id, session_id, sampling
):
    for seq_id in (1, 2):
        await finished_step(api, model_id, seq_id)
    save = {"model_id": model_id, "path": "x", "seq_id": 3}
    named = (await api.post("save_weights_for_sampler", json=save)).json()
    await api.post("retrieve_future", json={"request_id": named["request_id"]})
    path = f"tinker://{model_id}/sampler_weights/x"
    another_session = (await api.post("create_session", json={})).json()["session_id"]
    abroad = Sampling(api, another_session)
    there = await abroad.sample(await abroad.sampler(model_path=path), [1])
    await abroad.sample(await abroad.sampler(base_model=BASE_MODEL), [1])
    found = (await page(api, model_id))["requests"]
    assert [(each["id"], each["weights"]) for each in found] == [(there, path)]
    assert (await group(api, model_id, there))["model"] == path


async def test_an_unnamed_version_has_its_number_of_steps(api, services, model_id, session_id, sampling):
    await step(services.database, 1, loss=1.0, line=model_id)
    save = {"model_id": model_id, "sampling_session_seq_id": 50, "seq_id": 1}
    saved = (await api.post("save_weights_for_sampler", json=save)).json()
    result = await api.post("retrieve_future", json={"request_id": saved["request_id"]})
    await step(services.database, 2, loss=1.0, line=model_id)
    sampler = result.json()["sampling_session_id"]
    drawn = await sampling.sample(sampler, [1])
    (shown,) = (await page(api, model_id))["requests"]
    assert (shown["weights"], shown["steps"]) == ("version 50", 1)
    assert (await group(api, model_id, drawn))["model"] == sampler


async def test_samples_of_others_from_ones_weights_are_not_shown(client_for):
    alice, mallory = await client_for("alice"), await client_for("mallory")
    session_id = (await alice.post("create_session", json={})).json()["session_id"]
    lora = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    model_id = (await alice.post("create_model", json=lora)).json()["model_id"]
    save = {"model_id": model_id, "path": "x", "seq_id": 1}
    saved = (await alice.post("save_weights_for_sampler", json=save)).json()
    await alice.post("retrieve_future", json={"request_id": saved["request_id"]})
    route = f"training_runs/{model_id}/checkpoints/sampler_weights/x/publish"
    (await alice.post(route)).raise_for_status()
    his = Sampling(mallory, (await mallory.post("create_session", json={})).json()["session_id"])
    drawn = await his.sample(await his.sampler(model_path=f"tinker://{model_id}/sampler_weights/x"), [1])
    assert (await page(alice, model_id))["requests"] == []
    root = await client_for("root", role="admin")
    assert [each["id"] for each in (await page(root, model_id))["requests"]] == [drawn]
    refused = await alice.get(f"http://server/console/api/runs/{model_id}/samples/{drawn}")
    assert refused.status_code == 404
    assert "does not exist" in refused.json()["detail"]


async def test_what_is_damaged_or_too_large_is_listed_without_texts(
    api, services, model_id, sampling, of_base, monkeypatch
):
    request_id = await sampling.sample(of_base, [1, 2, 3])
    monkeypatch.setattr(sample_bodies, "MOST_BYTES", 8)
    (shown,) = (await page(api, model_id))["requests"]
    assert (shown["id"], shown["prompt"], shown["samples"]) == (request_id, None, [])
    refused = await api.get(f"http://server/console/api/runs/{model_id}/samples/{request_id}")
    assert refused.status_code == 404


async def test_a_failed_request_tells_its_error(api, services, model_id, sampling, of_base):
    request_id = await sampling.sample(of_base, [1, 2, 3])
    async with services.database.transaction() as db:
        failed = {"content_type": None, "error": "no more", "category": "user", "result_length": None}
        await db.execute(update(RequestRow).where(RequestRow.id == request_id).values(failed))
    (shown,) = (await page(api, model_id))["requests"]
    assert (shown["error"], shown["num_samples"], shown["prompt"]["tokens"]) == ("no more", 0, 3)
    assert (await group(api, model_id, request_id))["errors"] == ["no more"]
