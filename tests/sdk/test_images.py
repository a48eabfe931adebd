"""Images behind the real SDK: trained on and sampled from, with the log-probabilities that training has."""

import base64
import math
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anthropic
import httpx
import numpy as np
import openai
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from tests.sdk import seeing
from tests.sdk.examples import ADAM_STEP, SECONDS, drawn
from tests.sdk.seeing import PROMPT, SQUARE, TOKENS, datum, followed, image, logprobs, square, text
from tests.sdk.server import BASE_MODEL, serving

pytestmark = pytest.mark.timeout(600)

CLOSE = 1e-4  # nats


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def server(request, tmp_path_factory):
    if request.param == "qwen3_vl":
        yield request.getfixturevalue("seeing_server")
        return
    path = tmp_path_factory.mktemp("seeing")
    model = seeing.write_model(path / "model", request.param)
    with serving(model, path / "data", **seeing.OPTIONS) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def service(server):
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        yield service


def test_samples_have_the_log_probabilities_of_training(service):
    trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
    losses = list[float]()
    for _ in range(3):
        text_alone = datum([text(30, 4)])
        done = trainer.forward_backward([datum(PROMPT), text_alone, datum(PROMPT)], "cross_entropy")
        trainer.optim_step(ADAM_STEP).result(SECONDS)
        losses.append(done.result(SECONDS).metrics["loss:sum"])
    assert losses[-1] < losses[0]

    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    prompt = types.ModelInput(chunks=PROMPT)
    asked = {"include_prompt_logprobs": True, "sampling_params": drawn(max_tokens=20)}
    answer = sampler.sample(prompt, num_samples=3, **asked).result(SECONDS)
    for each in answer.sequences:
        trained = logprobs(trainer, followed(PROMPT, each.tokens))
        np.testing.assert_allclose(each.logprobs, trained[-20:], rtol=0, atol=CLOSE)
    scores, trained = answer.prompt_logprobs, logprobs(trainer, PROMPT)
    ends = np.cumsum([chunk.length for chunk in PROMPT])
    for begin, end, chunk in zip([0, *ends], ends, PROMPT, strict=False):
        for place in range(max(1, begin), end):
            if isinstance(chunk, types.ImageChunk):
                assert scores[place] is None or math.isnan(scores[place])
            else:
                assert scores[place] == pytest.approx(trained[place - 1], abs=CLOSE)

    again = sampler.sample(prompt, num_samples=1, sampling_params=drawn(max_tokens=20)).result(SECONDS)
    np.testing.assert_allclose(again.sequences[0].logprobs, answer.sequences[0].logprobs, rtol=0, atol=CLOSE)
    assert again.sequences[0].tokens == answer.sequences[0].tokens


def test_a_chat_reads_the_pictures_that_its_template_places(server, service):
    url = "data:image/png;base64," + base64.b64encode(SQUARE).decode()
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "And why?"},
    ]
    asked = {"model": BASE_MODEL, "max_tokens": 8, "temperature": 0, "seed": 1}
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key="tml-test", timeout=SECONDS) as client:
        chat = partial(client.chat.completions.create, **asked, extra_body={"return_token_ids": True})
        seen = chat(messages=[{"role": "user", "content": parts}])
        blind = chat(messages=[{"role": "user", "content": [parts[0], parts[2]]}])
    assert seen.usage.prompt_tokens == blind.usage.prompt_tokens + TOKENS[SQUARE] + 2  # with begin and end
    assert seen.usage.completion_tokens > 0


def test_a_trajectory_with_pictures_is_trained_on_as_it_was_sampled(server, service):
    url = "data:image/png;base64," + base64.b64encode(SQUARE).decode()
    picture = {"type": "image_url", "image_url": {"url": url}}
    said = [{"role": "user", "content": [{"type": "text", "text": "What?"}, picture]}]
    with openai.OpenAI(base_url=f"{server.url}/oai/api/in/seen/v1", api_key="tml-test") as client:
        ask = partial(client.chat.completions.create, model=BASE_MODEL, max_tokens=8, seed=1)
        said.append({"role": "assistant", "content": ask(messages=said).choices[0].message.content})
        ask(messages=[*said, {"role": "user", "content": [picture, {"type": "text", "text": "And?"}]}])
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"x-api-key": "tml-test"}) as client:
        answer = client.post("trajectories/sequences", json={"name": "seen", "leaves": "last"})
    (*_, segment) = answer.raise_for_status().json()["segments"]

    chunks, at = list[types.ModelInputChunk](), 0
    for each in segment["images"]:
        file = base64.b64decode(each["data"])
        chunks += [types.EncodedTextChunk(tokens=segment["tokens"][at : each["start"]]), image(file)]
        at = each["start"] + each["length"]
    chunks.append(types.EncodedTextChunk(tokens=segment["tokens"][at:]))
    trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
    trained, sampled = logprobs(trainer, chunks), np.array(segment["sampled"])
    assert sampled.sum() >= 8
    expected = np.array(segment["logprobs"])[sampled]
    np.testing.assert_allclose(trained[sampled[1:]], expected, rtol=0, atol=CLOSE)


def test_another_picture_gives_other_log_probabilities(service):
    trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
    seen = logprobs(trainer, PROMPT)
    different = logprobs(trainer, [PROMPT[0], square(9), *PROMPT[2:]])
    assert np.array_equal(seen[:6], different[:6])
    assert np.abs(seen[-5:] - different[-5:]).max() > CLOSE
    assert np.array_equal(seen, logprobs(trainer, PROMPT))


def test_a_damaged_picture_fails_its_own_request(service):
    trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
    cut = image(SQUARE[: len(SQUARE) // 2], 64)
    with pytest.raises(tinker.TinkerError, match="image"):
        logprobs(trainer, [PROMPT[0], cut, *PROMPT[2:]])
    assert np.isfinite(logprobs(trainer, PROMPT)[-5:]).all()


def run(url: str, interrupt: Callable[[], None], rank: int) -> tuple[list[float], list[list[int]]]:
    """Train and sample with images, and interrupt both; (log-probabilities, tokens of samples)."""
    with tinker.ServiceClient(base_url=url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=rank, seed=1).result(SECONDS)
        for step in range(4):
            gradient = trainer.forward_backward([datum(PROMPT), datum([text(20, step)])], "cross_entropy")
            update = trainer.optim_step(ADAM_STEP)
            if step == 2:
                interrupt()
            gradient.result(SECONDS)
            update.result(SECONDS)
        sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
        params = drawn(max_tokens=24, seed=1)
        asked = sampler.sample(types.ModelInput(chunks=PROMPT), num_samples=2, sampling_params=params)
        interrupt()
        tokens = [list(each.tokens) for each in asked.result(SECONDS).sequences]
        trainer.save_weights_for_sampler("saved").result(SECONDS)
        return list(logprobs(trainer, PROMPT)), tokens


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, 0], ids=["adapter", "all weights"])
def test_a_run_whose_server_is_killed_ends_like_one_without(tmp_path, rank):
    model = seeing.write_model(tmp_path / "model")
    sees = {"image_tokens": 1024, "full_parameters": not rank}
    with ExitStack() as servers:
        started = [servers.enter_context(serving(model, tmp_path / "data", **sees))]
        started[0].wait_until_ready()
        expected = run(started[0].url, lambda: None, rank)

        def kill() -> None:
            os.kill(started[-1].process.pid, signal.SIGKILL)
            started[-1].process.wait()
            port = started[-1].url.rpartition(":")[2]
            started.append(servers.enter_context(serving(model, tmp_path / "data", port=port, **sees)))

        assert run(started[0].url, kill, rank) == expected
    assert len(started) == 3
    if not rank:
        _check_tower(model, tmp_path / "data")


def _check_tower(model: Path, data: Path) -> None:
    """Check that models that were saved have the tower of the base, bit for bit, and other layers."""
    before, saved = load_file(model / "model.safetensors"), list(data.glob("checkpoints/*/*/saved"))
    assert saved
    for folder in saved:
        after = load_file(folder / "model.safetensors")
        assert after.keys() == before.keys()
        same = {name for name in before if before[name].tobytes() == after[name].tobytes()}
        assert same == {name for name in before if name.startswith("model.visual.")}


def test_chats_of_both_dialects_see_the_same(server):
    """Their prompts have the same tokens, so the second one finds the first one's image in the cache."""
    asked, file = "What is this?", base64.b64encode(SQUARE).decode()
    options = {"model": BASE_MODEL, "max_tokens": 8, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key="tml-test", timeout=SECONDS) as client:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}
        said = [{"role": "user", "content": [{"type": "text", "text": asked}, url]}]
        answer = client.chat.completions.create(messages=said, **options)
        blind = client.chat.completions.create(messages=[{"role": "user", "content": asked}], **options)
    assert answer.usage.prompt_tokens == blind.usage.prompt_tokens + TOKENS[SQUARE] + 2  # and two markers
    with anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key="tml-test") as client:
        source = {"type": "base64", "media_type": "image/png", "data": file}
        blocks = [{"type": "text", "text": asked}, {"type": "image", "source": source}]
        said, greedy = [{"role": "user", "content": blocks}], {"temperature": 0}
        message = client.messages.create(model=BASE_MODEL, max_tokens=8, messages=said, extra_body=greedy)
    assert message.content[0].text.strip() == answer.choices[0].message.content.strip()
    assert message.usage.cache_read_input_tokens > TOKENS[SQUARE]
