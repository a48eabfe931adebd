"""What an agent sampled through a base URL is trained on, by an unmodified client, token for token."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import numpy as np
import openai
import pytest
import tinker
from tinker import types

from tests.sdk.examples import SECONDS, supervised
from tests.sdk.server import BASE_MODEL, serving

LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
HEADERS = {"x-api-key": "tml-test"}


def play(url, name, model=BASE_MODEL, turns=3):
    """Chat with a model that knows nothing."""
    messages = [{"role": "user", "content": "Look."}]
    with openai.OpenAI(base_url=f"{url}/oai/api/in/{name}/v1", api_key="tml-test", timeout=SECONDS) as agent:
        for turn in range(turns):
            answer = agent.chat.completions.create(
                model=model, messages=messages, tools=[LOOK], max_tokens=12, seed=turn, temperature=1
            )
            messages += [answer.choices[0].message, {"role": "user", "content": f"And {turn}?"}]


def segments_of(url, name):
    answer = httpx.post(
        f"{url}/api/v1/trajectories/sequences", json={"name": name}, headers=HEADERS, timeout=SECONDS
    )
    return answer.raise_for_status().json()["segments"]


def datum(segment, advantage=1.0, *, with_spans=True):
    """A segment as the SDK takes it, as docs/agents.md has it."""
    sampled = np.array(segment["sampled"][1:], np.float32)
    plain = types.Datum(
        model_input=types.ModelInput.from_ints(segment["tokens"][:-1]),
        loss_fn_inputs={
            "target_tokens": segment["tokens"][1:],
            "logprobs": segment["logprobs"][1:],
            "advantages": (sampled * advantage).tolist(),
        },
    )
    if not with_spans:
        return plain
    return plain.with_provenance(
        model_input=spans(segment["spans"], drop_last=True),
        loss_fn_inputs=spans(segment["spans"], drop_last=False),
    )


def spans(tiles, *, drop_last):
    kinds = {"prompt": types.PromptProvenanceSpan, "sampled": types.SampledProvenanceSpan}
    rows = [list(tile) for tile in tiles]
    if drop_last:
        rows[-1][3] -= 1
    else:
        rows[0][2], rows[0][3] = rows[0][2] + 1, rows[0][3] - 1
    return [
        kinds[kind](sequence_id=id, offset=offset, length=length)
        for id, kind, offset, length in rows
        if length > 0
    ]


def scored_as_recorded(trainer: tinker.TrainingClient, segments):
    data = [supervised(segment["tokens"]) for segment in segments]
    outputs = trainer.forward(data, "cross_entropy").result(SECONDS).loss_fn_outputs
    for segment, output in zip(segments, outputs, strict=True):
        sampled = np.array(segment["sampled"][1:])
        recorded = np.array(segment["logprobs"][1:], np.float32)[sampled]
        assert len(recorded) > 0
        np.testing.assert_allclose(output["logprobs"].to_numpy()[sampled], recorded, atol=1e-4)


def test_forward_gives_the_log_probabilities_that_were_recorded(live_server, trainer):
    play(live_server.url, "forward")
    segments = segments_of(live_server.url, "forward")
    assert sum(sum(segment["sampled"]) for segment in segments) >= 3
    scored_as_recorded(trainer, segments)


def test_tokens_that_were_forced_are_told_and_not_trained(live_server, trainer):
    """They have the log-probabilities of the free model, like all others."""
    url = f"{live_server.url}/oai/api/in/forced/v1"
    demanded = {"regex": "hello [ab]{3}", "chat_template_kwargs": {"enable_thinking": False}}
    with openai.OpenAI(base_url=url, api_key="tml-test", timeout=SECONDS) as agent:
        agent.chat.completions.create(
            model=BASE_MODEL, messages=[{"role": "user", "content": "Say."}], extra_body=demanded
        )
    (segment,) = segments_of(live_server.url, "forced")
    forced, sampled = np.array(segment["forced"]), np.array(segment["sampled"])
    (turn,) = segment["turns"]
    drawn = np.arange(len(forced)) >= turn["start"]
    assert (sampled | forced).tolist() == drawn.tolist()
    assert not (sampled & forced).any()
    assert forced.sum() >= 3
    assert sampled.sum() >= 2
    scored_as_recorded(trainer, [segment | {"sampled": drawn.tolist()}])


PAGE = 16  # tokens
ASK = {"role": "user", "content": "Look."}


def tree_of(url, name):
    """The turns of the trajectory of this name."""
    with httpx.Client(base_url=f"{url}/api/v1/trajectories", headers=HEADERS, timeout=SECONDS) as api:
        (entry,) = api.get("", params={"name": name}).raise_for_status().json()["trajectories"]
        return api.get(f"/{entry['id']}").raise_for_status().json()["turns"]


def by_chat(url, turns):
    play(url, "cached-chat", turns=turns)


def by_messages(url, turns):
    base_url = f"{url}/anthropic/api/in/cached-messages"
    messages = [ASK]
    with anthropic.Anthropic(base_url=base_url, api_key="tml-test", timeout=SECONDS) as agent:
        for turn in range(turns):
            answer = agent.messages.create(
                model=BASE_MODEL, messages=messages, max_tokens=12, extra_body={"seed": turn}
            )
            messages += [{"role": "assistant", "content": answer.content}, ASK]


def by_responses(url, turns):
    base_url, last = f"{url}/oai/api/in/cached-responses/v1", None
    with openai.OpenAI(base_url=base_url, api_key="tml-test", timeout=SECONDS) as agent:
        for turn in range(turns):
            last = agent.responses.create(
                model=BASE_MODEL,
                input=[ASK],
                max_output_tokens=12,
                previous_response_id=None if last is None else last.id,
                extra_body={"seed": turn},
            )


@pytest.mark.parametrize("by", [by_chat, by_messages, by_responses])
def test_a_later_turn_finds_its_conversation_in_the_prefix_cache(live_server, by):
    """All of it but the page that was not full."""
    by(live_server.url, 3)
    turns = tree_of(live_server.url, by.__name__.replace("by_", "cached-"))
    later = [turn for turn in turns if turn["parent"] is not None]
    assert len(turns) == 3
    assert len(later) == 2
    for turn in later:
        assert turn["reused_tokens"] > 2 * PAGE
        assert turn["cached_tokens"] >= turn["reused_tokens"] - PAGE


def test_stable_reinforce_finds_what_was_recorded_in_the_owners_trajectories(live_server, trainer):
    play(live_server.url, "stable")
    segments = segments_of(live_server.url, "stable")
    output = trainer.forward_backward([datum(segment) for segment in segments], "stable_reinforce").result(
        SECONDS
    )
    assert np.isfinite(output.metrics["loss:sum"])
    foreign = datum(segments[0] | {"spans": [["0" * 32 + ":0", *rest] for _, *rest in segments[0]["spans"]]})
    with pytest.raises(tinker.RequestFailedError, match="nothing is recorded"):
        trainer.forward_backward([foreign], "stable_reinforce").result(SECONDS)


STREAMS = 50  # each second one has a grammar
PATTERN = "[a-z0-9]{120}"


def stream_of(url, number, seen):
    """Answer one turn whole, and stream the next until the server is gone."""
    base_url = f"{url}/oai/api/in/killed-{number:02}/v1"
    with openai.OpenAI(base_url=base_url, api_key="tml-test", timeout=SECONDS, max_retries=0) as agent:
        ids = {"return_token_ids": True}
        settings = {"model": BASE_MODEL, "seed": number, "temperature": 1, "extra_body": ids}
        whole = agent.chat.completions.create(messages=[ASK], max_tokens=8, **settings)
        seen[number] = [whole.choices[0].token_ids, []]
        messages = [ASK, whole.choices[0].message, {"role": "user", "content": "And?"}]
        if number % 2:
            ids |= {"regex": PATTERN, "chat_template_kwargs": {"enable_thinking": False}}
        try:
            for event in agent.chat.completions.create(
                messages=messages, max_tokens=200, stream=True, **settings
            ):
                for choice in event.choices:
                    seen[number][1] += getattr(choice, "token_ids", None) or []
        except (openai.APIError, httpx.HTTPError):
            pass  # the server was killed


@pytest.mark.timeout(900)
@pytest.mark.slow  # .venv/bin/pytest -m slow tests/sdk/test_trajectories.py -k killed
def test_turns_of_streams_whose_server_is_killed_are_kept_and_finished(model_dir, tmp_path):
    """First the worker goes, then the coordinator."""
    data_dir, seen = tmp_path / "data", {}
    with serving(model_dir, data_dir) as server, ThreadPoolExecutor(STREAMS) as pool:
        server.wait_until_ready()
        streams = [pool.submit(stream_of, server.url, number, seen) for number in range(STREAMS)]

        def until(count):
            while sum(bool(drawn) for _, drawn in list(seen.values())) < count:
                assert server.process.poll() is None
                assert not all(stream.done() for stream in streams)
                time.sleep(0.05)

        until(5)
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        until(20)
        workers = server.worker_pids()
        server.process.kill()
        server.process.wait()
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        for stream in streams:
            stream.exception()
    with serving(model_dir, data_dir) as server:
        server.wait_until_ready()
        trees = {number: settled_tree(server.url, f"killed-{number:02}") for number in seen}
        states = [turn["state"] for turns in trees.values() for turn in turns]
        assert set(states) <= {"sampled", "cut"}
        assert len(seen) >= 20
        for number, (answered, drawn) in seen.items():
            first, *later = [drawn_tokens(server.url, f"killed-{number:02}", turn) for turn in trees[number]]
            assert first == answered
            if drawn:
                assert later[0][: len(drawn)] == drawn
            if number % 2 and len(trees[number]) > 1 and trees[number][1]["state"] == "sampled":
                assert re.fullmatch(PATTERN, trees[number][1]["message"]["text"])


def settled_tree(url, name):
    """The turns when none of them is open any more."""
    while any(turn["state"] == "open" for turn in tree_of(url, name)):
        time.sleep(0.2)
    return tree_of(url, name)


def drawn_tokens(url, name, turn):
    """The tokens of a turn, as they are trained on."""
    for segment in segments_of(url, name):
        for each in segment["turns"]:
            if each["id"] == turn["id"]:
                return segment["tokens"][each["start"] : each["start"] + each["length"]]
    raise AssertionError(f"no segment has {turn['id']}")
