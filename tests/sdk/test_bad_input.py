"""What a client may do wrong: it is told what and how to do better, and no other tenant notices."""

import itertools

import numpy as np
import pytest
import tinker
from tinker import types

from tests.sdk.examples import (
    CONTEXT,
    SECONDS,
    VOCABULARY,
    batch,
    datum,
    drawn,
    greedy,
    logprobs_of,
    prompt,
    random_tokens,
    reinforced,
    sample,
    supervised,
    train,
)
from tests.sdk.server import BASE_MODEL

DATA = batch(seed=0)
PROMPT = random_tokens(10, seed=0)
IMAGE = types.ModelInput(chunks=[types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=1)])
ONES = [1.0, 1.0]


@pytest.fixture(scope="module")
def bystander(server):
    """A tenant in the middle of its work, and what its model and sampler say."""
    with tinker.ServiceClient(base_url=server.url, api_key="tml-bystander") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=4, seed=7).result(SECONDS)
        for seed in range(2):
            train(trainer, batch(seed))
        sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
        yield trainer, sampler, logprobs_of(trainer, DATA), sample(sampler, PROMPT, greedy())


@pytest.fixture(autouse=True)
def nobody_else_notices(live_server, bystander, request):
    """Asked after the last case of each test."""
    yield
    after = itertools.dropwhile(lambda item: item is not request.node, request.session.items)
    if getattr(next(itertools.islice(after, 1, None), None), "function", None) is request.function:
        return
    trainer, sampler, logprobs, answer = bystander
    np.testing.assert_array_equal(logprobs_of(trainer, DATA), logprobs)
    again = sample(sampler, PROMPT, greedy())
    assert (again.tokens, again.logprobs) == (answer.tokens, answer.logprobs)


@pytest.fixture(scope="module")
def service(server):
    """The tenant who does all this."""
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        yield service


@pytest.fixture(scope="module")
def trainer(service):
    """One that goes on after whatever was refused."""
    return service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)


@pytest.fixture(scope="module")
def base_sampler(service):
    return service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)


def refused_in_future(future, *parts: str) -> None:
    with pytest.raises(tinker.RequestFailedError) as caught:
        future.result(SECONDS)
    assert caught.value.category == types.RequestErrorCategory.User
    for part in parts:
        assert part in str(caught.value)


def refused_at_once(future, *parts: str, error: type[tinker.APIStatusError] = tinker.BadRequestError) -> None:
    with pytest.raises(error) as caught:
        future.result(SECONDS)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "bad, loss, config, parts",
    [
        ([supervised([1, 2, 3])], "no_such_loss", None, ["'no_such_loss'", "this service has cross_entropy"]),
        (
            [reinforced([1, 2, 3], ONES, ONES)],
            "ppo",
            {"clip_height": 1.0},
            ["'clip_height'", "clip_low_threshold, clip_high_threshold"],
        ),
        (
            [reinforced([1, 2, 3], ONES, ONES)],
            "ppo",
            {"clip_low_threshold": 2.0},
            ["clip_low_threshold 2.0 above clip_high_threshold 1.2"],
        ),
        ([datum([1, 2])], "cross_entropy", None, ["datum 0", "lacks target_tokens"]),
        (
            [datum([1, 2], target_tokens=np.array([[2, 3], [4, 5]]))],
            "cross_entropy",
            None,
            ["lacks weights", "one target per position"],
        ),
        ([supervised([1, 2, 3])], "importance_sampling", None, ["lacks logprobs"]),
        ([datum([1, 2], target_tokens=[2, 3], logprobs=ONES)], "ppo", None, ["lacks advantages"]),
        (
            [datum([1, 2], target_tokens=[2, 3], weights=ONES, reward=np.ones(2))],
            "cross_entropy",
            None,
            ["'reward'", "takes target_tokens and, if you like, weights"],
        ),
        (
            [DATA[0], datum([1, 2], target_tokens=[2], weights=ONES)],
            "cross_entropy",
            None,
            ["datum 1", "target_tokens has the shape [1]", "2 tokens"],
        ),
        (
            [datum([1, 2], target_tokens=[2, 3], weights=[1.0, 1.0, 1.0])],
            "cross_entropy",
            None,
            ["weights has the shape [3]", "2 tokens"],
        ),
        (
            [datum([1, 2], target_tokens=np.ones((2, 3), int), logprobs=ONES, advantages=ONES)],
            "ppo",
            None,
            ["shape [2, 3]", "one target per position"],
        ),
        (
            [datum([1, 2], target_tokens=np.array([2.0, 3.0]), weights=ONES)],
            "cross_entropy",
            None,
            ["target_tokens has dtype float32", "send int64"],
        ),
        ([supervised([1, 2, 3], [1.0, np.nan])], "cross_entropy", None, ["weights has nan at position 1"]),
        (
            [reinforced([1, 2, 3], ONES, [np.inf, 1.0])],
            "importance_sampling",
            None,
            ["advantages has inf at position 0"],
        ),
        (
            [reinforced([1, 2, 3], [np.nan, 1.0], ONES)],
            "importance_sampling",
            None,
            ["logprobs has nan at position 0", "finite wherever the advantage is not 0"],
        ),
        ([supervised([1, 512, 3])], "cross_entropy", None, ["512 at position 1", "0 to 511"]),
        ([supervised([1, -5, 3])], "cross_entropy", None, ["-5", "0 to 511"]),
        ([supervised([1, 2, 512])], "cross_entropy", None, ["target_tokens has 512", "0 to 511"]),
        ([datum([], target_tokens=[], weights=[])], "cross_entropy", None, ["model_input is empty"]),
        (
            [supervised([1] * (CONTEXT + 2))],
            "cross_entropy",
            None,
            [f"{CONTEXT + 1} tokens", f"the context holds {CONTEXT}", "--max-context-length"],
        ),
        (
            [types.Datum(model_input=IMAGE, loss_fn_inputs=DATA[0].loss_fn_inputs)],
            "cross_entropy",
            None,
            ["'image'", "encoded_text"],
        ),
    ],
)
def test_a_batch_that_cannot_be_trained_on_fails_its_future(trainer, bad, loss, config, parts):
    refused_in_future(trainer.forward_backward(bad, loss, config), *parts)
    refused_in_future(trainer.forward(bad, loss, config), *parts)
    train(trainer, DATA)


@pytest.mark.parametrize("name, value", [("learning_rate", -1.0), ("beta1", 1.0), ("eps", -1.0)])
def test_an_optimizer_setting_out_of_range_is_named(trainer, name, value):
    future = trainer.optim_step(types.AdamParams(**{name: value}))
    refused_in_future(future, f"adam_params.{name} is {value}", "must be")
    train(trainer, DATA)


def test_a_model_that_cannot_be_made_is_refused(service):
    def create(base_model: str = BASE_MODEL, **options):
        return service.create_lora_training_client(base_model, **options)

    refused_at_once(create("meta/unknown"), "'meta/unknown'", f"serves '{BASE_MODEL}'")
    refused_at_once(create(rank=0), "rank is 0", "between 1 and 32")
    refused_at_once(create(rank=33), "rank is 33", "between 1 and 32", "--max-lora-rank")
    sampler = service.create_sampling_client(base_model="meta/unknown")
    refused_at_once(sampler, "'meta/unknown'", f"serves '{BASE_MODEL}'")


@pytest.mark.parametrize(
    "tokens, params, parts",
    [
        ([], {}, ["prompt is empty", "at least one token"]),
        ([1] * CONTEXT, {}, [f"has {CONTEXT} tokens", f"holds {CONTEXT}"]),
        ([1] * CONTEXT, {"max_tokens": None}, [f"has {CONTEXT} tokens", f"shorten it to {CONTEXT - 1}"]),
        (
            PROMPT,
            {"max_tokens": 100_000},
            ["too long", "max_tokens 100000", f"send max_tokens {CONTEXT - 10}"],
        ),
        (PROMPT, {"max_tokens": 0}, ["max_tokens is 0", "at least 1"]),
        ([1, VOCABULARY], {}, ["token ID 512", "0 to 511"]),
        ([1, -5], {}, ["token ID -5", "0 to 511"]),
        (PROMPT, {"temperature": -1.0}, ["temperature is -1", "at least 0"]),
        (PROMPT, {"top_p": 0.0}, ["top_p is 0", "above 0"]),
        (PROMPT, {"top_p": 1.5}, ["top_p is 1.5", "at most 1"]),
        (PROMPT, {"top_k": 0}, ["top_k is 0", "-1 (off)"]),
        (PROMPT, {"seed": 2**64}, ["seed", "64-bit"]),
        (PROMPT, {"stop": [VOCABULARY]}, ["token ID 512", "0 to 511"]),
        (PROMPT, {"stop": ""}, ["empty string", "[]"]),
    ],
)
def test_a_sample_that_cannot_be_drawn_is_refused(base_sampler, tokens, params, parts):
    params = types.SamplingParams(**{"max_tokens": 4, **params})
    refused_at_once(base_sampler.sample(prompt(tokens), 1, params), *parts)
    assert sample(base_sampler, PROMPT, drawn()).tokens


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_a_number_of_samples_out_of_range_is_refused(base_sampler, count):
    refused_at_once(
        base_sampler.sample(prompt(PROMPT), count, drawn()), f"num_samples is {count}", "between 1"
    )


def test_an_image_cannot_be_sampled_from(base_sampler):
    refused_at_once(base_sampler.sample(IMAGE, 1, drawn()), "'image'", "encoded_text")


def test_the_limit_of_the_context_can_be_asked_for(rest):
    (model,) = rest.get_server_capabilities().result(SECONDS).supported_models
    assert (model.model_name, model.max_context_length) == (BASE_MODEL, CONTEXT)


def test_a_gradient_that_overflows_is_not_applied_and_hurts_nobody(new_trainer, base_sampler):
    unlucky, careful = new_trainer(), new_trainer()
    for each in (unlucky, careful):
        train(each, DATA)
    overflowing = reinforced(PROMPT, [-300.0] * 9, [1.0] * 9)
    gradient = unlucky.forward_backward([overflowing], "importance_sampling")
    refused_in_future(
        unlucky.optim_step(types.AdamParams()), "not taken", "not finite", "logprobs", "learning rate"
    )
    assert not np.isfinite(gradient.result(SECONDS).metrics["loss:sum"])
    for each in (unlucky, careful):
        train(each, batch(seed=1))
    np.testing.assert_array_equal(logprobs_of(unlucky, DATA), logprobs_of(careful, DATA))
    assert sample(base_sampler, PROMPT, drawn()).tokens


def test_a_step_that_would_overflow_the_weights_is_not_taken(new_trainer):
    reckless, careful = new_trainer(), new_trainer()
    reckless.forward_backward(DATA, "cross_entropy")
    refused_in_future(reckless.optim_step(types.AdamParams(learning_rate=1e39)), "it must be finite")
    reckless.forward_backward(DATA, "cross_entropy")
    overflowing = types.AdamParams(learning_rate=3e38, weight_decay=1e9)
    refused_in_future(reckless.optim_step(overflowing), "not taken")
    for each in (reckless, careful):
        train(each, DATA)
    np.testing.assert_array_equal(logprobs_of(reckless, DATA), logprobs_of(careful, DATA))


def test_weights_that_are_finite_but_absurd_hurt_nobody(new_trainer, base_sampler):
    trainer = new_trainer()
    train(trainer, DATA, adam=types.AdamParams(learning_rate=1e37))
    assert not np.isfinite(logprobs_of(trainer, DATA)).all()
    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    futures = [each.sample(prompt(PROMPT), 2, drawn()) for each in (sampler, base_sampler, sampler)]
    alone = base_sampler.sample(prompt(PROMPT), 2, drawn()).result(SECONDS)
    together = futures[1].result(SECONDS)
    assert [each.tokens for each in together.sequences] == [each.tokens for each in alone.sequences]
    for future in futures:
        future.result(SECONDS)


def test_names_that_nobody_knows_are_not_found(service, rest):
    for path in ("tinker://nobody:train:0/weights/x", "tinker://nobody:train:0/sampler_weights/x"):
        create = (
            service.create_training_client_from_state
            if "/weights/" in path
            else lambda path: service.create_sampling_client(model_path=path)
        )
        refused_at_once(create(path), path, "list_user_checkpoints", error=tinker.NotFoundError)
    refused_at_once(rest.get_training_run("nobody:train:0"), "nobody:train:0", error=tinker.NotFoundError)
    refused_at_once(rest.get_session("nobody"), "nobody", error=tinker.NotFoundError)
    refused_at_once(rest.get_sampler("nobody:sample:0"), "nobody:sample:0", error=tinker.NotFoundError)


@pytest.mark.parametrize("path", ["elsewhere", "tinker://a/b", "tinker://run/weights/../x"])
def test_what_is_no_checkpoint_path_is_refused(service, path):
    refused_at_once(
        service.create_training_client_from_state(path), "not a checkpoint path", "tinker://RUN/weights/NAME"
    )


@pytest.mark.parametrize("name", ["../../etc", ".hidden", "a/b", "x" * 300])
def test_a_name_that_is_no_folders_name_is_refused(trainer, name):
    for save in (trainer.save_state, trainer.save_weights_for_sampler):
        refused_in_future(save(name), name[:20], "name")
