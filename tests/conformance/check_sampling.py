"""Checks of SamplingClient. Each runs twice: on the client, and on the future of one."""

import contextlib
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.lib.api_future_impl import QueueState

from tests.conformance.check_training import telemetry_is_accepted
from tests.conformance.registry import TWINS, Standing, covers
from tests.conformance.world import PROMPT, World, settled, twins
from tests.sdk.examples import SECONDS, VOCABULARY, drawn, greedy, logprobs_of, prompt, supervised
from tests.sdk.server import BASE_MODEL


@covers(
    f"SamplingClient.sample{TWINS}",
    does="draws sequences with their log-probabilities; scores the prompt as asked",
    effect="the log-probabilities of prompt and sample are the trainer's; a seed fixes the tokens; stop "
    "tokens and lengths end a sequence",
)
def sample(world: World) -> None:
    sampler = world.new_sampler(world.sampler_path)
    scored = logprobs_of(world.trained, [supervised(PROMPT)])
    for method in twins(sampler, "sample"):
        one, two = (method(prompt(PROMPT), 2, drawn(max_tokens=5, seed=9)).sequences for _ in range(2))
        assert [list(each.tokens) for each in one] == [list(each.tokens) for each in two]
        assert list(one[0].tokens) != list(one[1].tokens)
        assert {each.stop_reason for each in one} == {"length"}
        stop = one[0].tokens[2]
        stopped = method(prompt(PROMPT), 1, drawn(max_tokens=5, seed=9, stop=[stop])).sequences[0]
        assert (stopped.stop_reason, stopped.tokens[-1]) == ("stop", stop)
        response = method(prompt(PROMPT), 1, greedy(2), include_prompt_logprobs=True)
        assert response.prompt_logprobs[0] is None
        np.testing.assert_allclose(response.prompt_logprobs[1:], scored, atol=1e-4)
    last = settled(sampler.sample)(
        prompt(PROMPT), 1, greedy(1), include_prompt_logprobs=True, prompt_logprobs_last_n=3
    )
    assert [value is None for value in last.prompt_logprobs] == [True] * 7 + [False] * 3


@covers(
    "SamplingClient.sample (top-k, targets, alternatives)",
    does="the most probable tokens of each position, the log-probabilities of given ones, drawn alternatives",
    effect="the best of the top k is what greedy sampling takes; targets that are the prompt score as it; "
    "alternatives are tokens with their log-probabilities",
)
def sample_scores(world: World) -> None:
    sampler = world.new_sampler(world.sampler_path)
    scored = logprobs_of(world.trained, [supervised(PROMPT)])
    targets = types.TensorData(data=PROMPT[1:], dtype="int64", shape=[len(PROMPT) - 1, 1])
    response = settled(sampler.sample)(
        prompt(PROMPT),
        1,
        greedy(3),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=2,
    )
    (sequence,) = response.sequences
    assert [row[0][0] for row in sequence.topk_logprobs] == list(sequence.tokens)
    np.testing.assert_allclose([row[0][1] for row in sequence.topk_logprobs], sequence.logprobs, atol=1e-5)
    assert response.topk_prompt_logprobs[0] is None
    assert [len(row) for row in response.topk_prompt_logprobs[1:]] == [4] * (len(PROMPT) - 1)
    np.testing.assert_allclose(response.target_prompt_logprobs.to_numpy().ravel(), scored, atol=1e-4)
    tokens, logprobs = (
        response.prompt_alt_tokens.tokens.to_numpy(),
        response.prompt_alt_tokens.logprobs.to_numpy(),
    )
    assert tokens.shape == logprobs.shape == (len(PROMPT) - 1, 2)
    assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
    assert (logprobs < 0).all()


@covers(
    f"SamplingClient.compute_logprobs{TWINS}",
    does="scores a prompt",
    effect="as the trainer's forward; None for the first token, and before the last n",
)
def compute_logprobs(world: World) -> None:
    scored = logprobs_of(world.trained, [supervised(PROMPT)])
    for method in twins(world.new_sampler(world.sampler_path), "compute_logprobs"):
        found = method(prompt(PROMPT))
        assert found[0] is None
        np.testing.assert_allclose(found[1:], scored, atol=1e-4)
        last = method(prompt(PROMPT), prompt_logprobs_last_n=2)
        assert last[:-2] == [None] * (len(PROMPT) - 2)
        np.testing.assert_allclose(last[-2:], scored[-2:], atol=1e-4)


@covers(
    "SamplingClient.create",
    does="opens a sampler of a checkpoint, of the base model, or of a sampler's ID",
    effect="all three sample; what is nobody's is not found",
)
def create(world: World) -> None:
    holder = world.base_sampler.holder
    choices: list[dict[str, Any]] = [
        {"base_model": BASE_MODEL},
        {"model_path": world.sampler_path},
        {"sampling_session_id": world.base_sampler._sampling_session_id},
    ]
    for weights in choices:
        opened = tinker.SamplingClient.create(holder, **weights).result(SECONDS)
        assert opened.sample(prompt(PROMPT), 1, greedy(2)).result(SECONDS).sequences
    path = "tinker://nobody:train:0/sampler_weights/x"
    with pytest.raises(tinker.NotFoundError, match="nobody"):
        tinker.SamplingClient.create(holder, model_path=path).result(SECONDS)


@covers(
    "SamplingClient.get_sampler_handle",
    "SamplingClient.from_sampler_handle",
    does="lets other processes join a sampler, each with numbers of its own",
    effect="clients made from one handle, and a pickled one, sample the same tokens with the same seed, and "
    "different ones without",
)
def sampler_handle(world: World) -> None:
    sampler = world.new_sampler(world.sampler_path)
    handle = sampler.get_sampler_handle()
    joined = [tinker.SamplingClient.from_sampler_handle(handle, api_key=world.key) for _ in range(2)]
    joined.append(pickle.loads(pickle.dumps(sampler)))
    clients = [settled_client(sampler), *joined]
    alike = [client.sample(prompt(PROMPT), 1, drawn(seed=4)).result(SECONDS) for client in clients]
    assert len({tuple(each.sequences[0].tokens) for each in alike}) == 1
    params = types.SamplingParams(max_tokens=8, stop=[])
    free = [client.sample(prompt(PROMPT), 1, params).result(SECONDS) for client in clients]
    assert len({tuple(each.sequences[0].tokens) for each in free}) == len(clients)


@covers(
    f"SamplingClient.get_base_model{TWINS}",
    does="tells a sampler's base model",
    effect="it is the served one",
)
def get_base_model(world: World) -> None:
    for method in twins(world.new_sampler(world.sampler_path), "get_base_model"):
        assert method() == BASE_MODEL


@covers(
    "SamplingClient.get_tokenizer",
    does="names the base model, whose tokenizer the SDK loads",
    effect="its tokenizer encodes text, and decodes it again",
)
def get_tokenizer(world: World) -> None:
    sampler = world.new_sampler()
    with contextlib.chdir(world.model_dir.parent):  # where the base model's name is that of its folder
        tokenizer = sampler.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("conformance")) == "conformance"


@covers(
    "SamplingClient.on_queue_state_change",
    does="the SDK's own callback: it logs why samples wait, as the server has said with a future",
    effect="the reason is in the log",
    standing=Standing.LOCAL,
)
def on_queue_state_change(world: World) -> None:
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tinker.lib.public_interfaces.sampling_client")
    logger.addHandler(handler)
    try:
        world.new_sampler().on_queue_state_change(QueueState.PAUSED_CAPACITY, "3 samples ahead")
    finally:
        logger.removeHandler(handler)
    assert "3 samples ahead" in lines[0]


@covers(
    "SamplingClient.get_telemetry",
    does="takes the SDK's telemetry, and drops it",
    effect="what is logged and flushed is accepted",
)
def get_telemetry(world: World) -> None:
    telemetry_is_accepted(world.new_sampler())


def settled_client(sampler: object) -> tinker.SamplingClient:
    return sampler.result(SECONDS) if isinstance(sampler, tinker.APIFuture) else sampler  # pyright: ignore
