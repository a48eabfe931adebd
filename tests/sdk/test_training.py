"""Training through the real SDK: what is computed, in which order, and that nobody else matters."""

import urllib.request

import numpy as np
import pytest
import tinker
from tinker import types

from tests.sdk.examples import (
    ADAM_STEP,
    PLAIN_STEP,
    SECONDS,
    batch,
    drawn,
    gradient_norm,
    logprobs_of,
    random_tokens,
    reinforced,
    sample,
    supervised,
    train,
)
from tests.sdk.server import BASE_MODEL
from tests.sdk.shared_servers import SLOTS

DATA = batch(seed=0)
QUESTION = batch(seed=9)  # asked of models that are compared


def test_supervised_steps_lower_the_loss(trainer):
    losses = [train(trainer, DATA) for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_the_loss_is_the_sum_over_tokens_and_datums(trainer):
    output = trainer.forward(DATA, "cross_entropy").result(SECONDS)
    logprobs = [fields["logprobs"].to_numpy() for fields in output.loss_fn_outputs]
    assert [len(each) for each in logprobs] == [datum.model_input.length for datum in DATA]
    assert output.metrics["loss:sum"] == pytest.approx(-np.concatenate(logprobs).sum(dtype=np.float64))


def test_requests_run_in_the_order_of_their_numbers_whatever_order_they_arrive_in(api):
    halves = DATA[:2], DATA[2:]
    in_order, reversed_ = api.create_model(0), api.create_model(1)
    calls = [
        lambda model: api.forward_backward(model, 1, halves[0]),
        lambda model: api.forward_backward(model, 2, halves[1]),
        lambda model: api.optim_step(model, 3),
        lambda model: api.forward_backward(model, 4, halves[0]),
        lambda model: api.optim_step(model, 5),
    ]
    for model, order in ((in_order, calls), (reversed_, calls[::-1])):
        for call in order:
            call(model)
    expected = api.logprobs(in_order, 6, QUESTION)
    np.testing.assert_array_equal(api.logprobs(reversed_, 6, QUESTION), expected)


def test_a_call_of_many_chunks_is_one_sum(trainer):
    count = 1024 + 100  # the SDK sends at most 1024 datums at once, the first chunk last
    (single,) = batch(seed=1, lengths=[3])
    one = trainer.forward_backward([single], "cross_entropy").result(SECONDS)
    norm_of_one = gradient_norm(trainer)
    many = trainer.forward_backward([single] * count, "cross_entropy").result(SECONDS)
    assert len(many.loss_fn_outputs) == count
    assert many.metrics["loss:sum"] == pytest.approx(count * one.metrics["loss:sum"], rel=1e-5)
    assert gradient_norm(trainer) == pytest.approx(count * norm_of_one, rel=1e-4)


def test_an_optim_step_that_is_sent_twice_is_taken_once(api):
    twice, once = api.create_model(0), api.create_model(1)
    for model in (twice, once):
        api.forward_backward(model, 1, DATA)
        first = api.optim_step(model, 2)
        if model == twice:
            assert api.optim_step(model, 2) == first
            api.retrieve(first)
            assert api.optim_step(model, 2) == first
    np.testing.assert_array_equal(api.logprobs(twice, 3, QUESTION), api.logprobs(once, 3, QUESTION))


def test_a_failed_batch_changes_nothing_for_the_next_one(new_trainer):
    disturbed, alone = new_trainer(), new_trainer()
    failing = disturbed.forward_backward([*DATA, supervised([1, 2, 512])], "cross_entropy")
    train(disturbed, DATA)
    train(alone, DATA)
    with pytest.raises(tinker.RequestFailedError, match="512"):
        failing.result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(disturbed, QUESTION), logprobs_of(alone, QUESTION))


def test_tenants_side_by_side_get_the_numbers_that_each_gets_alone(service, other_service, base_sampler):
    """Bit for bit, with different ranks, data, losses and lengths, and samples in between."""

    def new_tenants() -> list[tinker.TrainingClient]:
        creators = [(service, 8), (other_service, 2)]
        return [
            creator.create_lora_training_client(BASE_MODEL, rank=rank, seed=rank).result(SECONDS)
            for creator, rank in creators
        ]

    def steps(tenant: int) -> list[list[types.Datum]]:
        lengths = [(20, 9, 31), (5, 6, 7, 8)][tenant]
        return [batch(seed=step, lengths=lengths) for step in range(3)]

    alone = []
    for tenant, trainer in enumerate(new_tenants()):
        for data in steps(tenant):
            train(trainer, data)
        alone.append(logprobs_of(trainer, QUESTION))

    together = new_tenants()
    futures = []
    for data_of_all in zip(steps(0), steps(1), strict=True):
        for trainer, data in zip(together, data_of_all, strict=True):
            futures += [trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(ADAM_STEP)]
        futures.append(base_sampler.sample(DATA[0].model_input, 2, drawn(max_tokens=8)))
    for future in futures:
        future.result(SECONDS)
    for trainer, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(logprobs_of(trainer, QUESTION), expected)


def test_datums_in_one_call_or_in_many_are_the_same_gradient(new_trainer):
    whole, split = new_trainer(), new_trainer()
    train(whole, DATA, adam=PLAIN_STEP)
    for datum in DATA[:-1]:
        split.forward_backward([datum], "cross_entropy")
    train(split, DATA[-1:], adam=PLAIN_STEP)
    expected = logprobs_of(whole, QUESTION)
    assert np.abs(expected - logprobs_of(new_trainer(), QUESTION)).max() > 1e-2
    np.testing.assert_allclose(logprobs_of(split, QUESTION), expected, atol=1e-5)


def test_forward_leaves_gradients_alone(trainer):
    trainer.forward_backward(DATA, "cross_entropy")
    expected = gradient_norm(trainer)
    trainer.forward_backward(DATA, "cross_entropy")
    trainer.forward(DATA, "cross_entropy")
    assert gradient_norm(trainer) == expected
    trainer.forward(DATA, "cross_entropy")
    assert gradient_norm(trainer) == 0


@pytest.mark.parametrize(
    "calls",
    [
        [[supervised(random_tokens(12, 0), [2.0] * 11)]],
        [[supervised(random_tokens(12, 0))] * 2],
        [[supervised(random_tokens(12, 0))]] * 2,
    ],
    ids=["double weights", "the same datum twice", "two calls"],
)
def test_gradients_are_sums(trainer, calls):
    trainer.forward_backward([supervised(random_tokens(12, 0))], "cross_entropy")
    single = gradient_norm(trainer)
    for data in calls:
        trainer.forward_backward(data, "cross_entropy")
    assert gradient_norm(trainer) == pytest.approx(2 * single, rel=1e-5)


def test_weights_of_any_sign_are_exact(trainer):
    """Custom losses come as weights that are the negative gradients of the logprobs."""
    tokens = random_tokens(12, 0)
    weights = np.linspace(-2.0, 1.0, 11)
    rest = 1 - weights
    norms = []
    for data in (
        [supervised(tokens)],
        [supervised(tokens, weights.tolist()), supervised(tokens, rest.tolist())],
        [supervised(tokens, weights.tolist()), supervised(tokens, (-weights).tolist())],
    ):
        trainer.forward_backward(data, "cross_entropy")
        norms.append(gradient_norm(trainer))
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert norms[2] < 1e-5 * norms[0]


def test_a_custom_loss_moves_the_logprobs_as_its_gradient_says(trainer):
    """What forward_backward_custom sends: a forward, then its own gradient as weights."""
    tokens = random_tokens(12, 0)
    before = logprobs_of(trainer, [supervised(tokens)])
    wish = np.where(np.arange(11) % 2, 1.0, -1.0)  # raise the odd places, lower the even ones
    train(trainer, [supervised(tokens, wish.tolist())], adam=PLAIN_STEP)
    moved = logprobs_of(trainer, [supervised(tokens)]) - before
    assert (moved * wish).sum() > 1e-3


def test_positions_without_advantage_may_have_any_logprob(trainer):
    tokens = random_tokens(9, 3)
    norms = []
    for filler in (0.0, -np.inf):
        datum = reinforced(tokens, [filler] * 4 + [-6.0] * 4, [0.0] * 4 + [1.0] * 4)
        trainer.forward_backward([datum], "importance_sampling")
        norms.append(gradient_norm(trainer))
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize(
    "loss, config",
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
        ("dro", {"beta": 0.1}),
    ],
)
def test_on_policy_losses_agree_with_their_formulas(trainer, loss, config):
    """Where the ratio is 1, every loss has the gradient of the plain policy loss."""
    tokens = random_tokens(12, 4)
    advantages = np.linspace(-1, 1, 11).tolist()
    logprobs = logprobs_of(trainer, [supervised(tokens)]).tolist()
    trainer.forward_backward([supervised(tokens, advantages)], "cross_entropy")
    expected = gradient_norm(trainer)
    output = trainer.forward_backward([reinforced(tokens, logprobs, advantages)], loss, config).result(
        SECONDS
    )
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].to_numpy(), logprobs, atol=1e-6)
    weighted = float(np.dot(logprobs, advantages)) if loss in ("cispo", "dro") else float(np.sum(advantages))
    assert output.metrics["loss:sum"] == pytest.approx(-weighted, abs=1e-4)
    assert gradient_norm(trainer) == pytest.approx(expected, rel=1e-4)


def test_only_the_layers_that_were_asked_for_are_trained(new_trainer):
    """The squares of the norms of disjoint gradients add up."""
    groups = ("train_attn", "train_mlp", "train_unembed")
    norms = []
    for wanted in (groups, *([name] for name in groups)):
        trainer = new_trainer(**{name: name in wanted for name in groups})
        trainer.forward_backward(DATA, "cross_entropy")
        norms.append(gradient_norm(trainer))
    assert all(0 < norm < norms[0] for norm in norms[1:])
    assert norms[0] == pytest.approx(np.linalg.norm(norms[1:]), rel=1e-4)


def test_a_clipped_gradient_is_a_smaller_one(new_trainer):
    clipped, scaled, free = (new_trainer() for _ in range(3))
    clipped.forward_backward(DATA, "cross_entropy")
    norm = gradient_norm(clipped)
    clipped, limit = new_trainer(), norm / 4
    train(clipped, DATA, adam=PLAIN_STEP.model_copy(update={"grad_clip_norm": limit}))
    quarter = [supervised(random_tokens(length, 0), [0.25] * (length - 1)) for length in (20, 9, 31)]
    train(scaled, quarter, adam=PLAIN_STEP)
    train(free, DATA, adam=PLAIN_STEP)
    expected = logprobs_of(scaled, QUESTION)
    np.testing.assert_allclose(logprobs_of(clipped, QUESTION), expected, atol=1e-5)
    assert np.abs(logprobs_of(free, QUESTION) - expected).max() > 1e-3


def test_weight_decay_shrinks_ones_own_weights_only(service, other_service):
    neighbour = other_service.create_lora_training_client(BASE_MODEL, rank=4, seed=2).result(SECONDS)
    trainer = service.create_lora_training_client(BASE_MODEL, rank=4, seed=2).result(SECONDS)
    untrained = logprobs_of(trainer, QUESTION)
    for each in (neighbour, trainer):
        train(each, DATA)
    trained = logprobs_of(neighbour, QUESTION)
    trainer.optim_step(types.AdamParams(learning_rate=1.0, weight_decay=1.0, beta1=0.0)).result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(neighbour, QUESTION), trained)
    # Decoupled decay of rate 1 leaves nothing of the adapter, so the base model is what is left.
    np.testing.assert_allclose(logprobs_of(trainer, QUESTION), untrained, atol=1e-6)


def test_training_through_samples_and_their_logprobs_raises_the_reward(trainer):
    """The loop of reinforcement learning, with the share of even tokens as its reward."""
    rewards = []
    for step in range(8):
        sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
        answers = sampler.sample(
            types.ModelInput.from_ints([1, 2, 3]), 8, drawn(max_tokens=8, seed=step)
        ).result(SECONDS)
        reward = [np.mean(np.array(answer.tokens) % 2 == 0) for answer in answers.sequences]
        advantage = np.array(reward) - np.mean(reward)
        data = [
            reinforced([1, 2, 3, *answer.tokens], [0, 0, *answer.logprobs], [0, 0, *[each] * 8])
            for answer, each in zip(answers.sequences, advantage.tolist(), strict=True)
        ]
        train(trainer, data, "importance_sampling", types.AdamParams(learning_rate=0.05))
        rewards.append(np.mean(reward))
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2
    assert sample(sampler, [1, 2, 3], drawn()).tokens


def test_more_models_than_slots_learn_what_each_would_alone(new_trainer, server):
    """They leave their slots amid their gradients; the same requests bring the same bits."""
    trainers = [new_trainer(rank=4, seed=5) for _ in range(SLOTS + 2)]
    for seed in (1, 2):
        for gradient in [trainer.forward_backward(batch(seed), "cross_entropy") for trainer in trainers]:
            gradient.result(SECONDS)
    for update in [trainer.optim_step(ADAM_STEP) for trainer in trainers]:
        update.result(SECONDS)
    first, *others = [logprobs_of(trainer, QUESTION) for trainer in trainers]
    for logprobs in others:
        np.testing.assert_array_equal(logprobs, first)
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        assert 'spmd_tx_swap_seconds_count{direction="in",group="main",tier="host"}' in answer.read().decode()
