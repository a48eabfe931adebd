"""recipes/rl_loop.py: its losses, and replies that end at a token or at a text."""

import pytest

from tests.cookbook.cookbook import Cookbook, Run, mean

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]

STEPS = 32
SIZES = {"batch_size": 8, "group_size": 8, "max_tokens": 12, "save_every": 0, "max_steps": STEPS}
LEARNING_RATE = 1e-3  # of 2e-3 one step in some hundred is enough to forget how an answer is written


def rl_loop(cookbook: Cookbook, **options) -> Run:
    run = cookbook.run("rl_loop", **(SIZES | options))
    rewards = run.values("reward/total")
    first, last = mean(rewards[:4]), mean(rewards[-4:])
    cookbook.report(
        f"mean reward {first:.2f} in the first four steps, {last:.2f} in the last four of {len(rewards)}"
    )
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["final"]
    return run


def finds_the_frequent_answer(run: Run) -> bool:
    """Drawn at random, an answer is right one time in ten; the frequent one is right in seven of ten."""
    rewards = run.values("reward/total")
    return len(rewards) == STEPS and mean(rewards[:4]) <= 0.25 and mean(rewards[-4:]) >= 0.5


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_each_loss_finds_the_frequent_answer(cookbook, loss):
    assert finds_the_frequent_answer(rl_loop(cookbook, learning_rate=LEARNING_RATE, loss_fn=loss))


def test_the_default_loss_finds_the_frequent_answer_and_says_whose_formula_it_is(cookbook):
    run = rl_loop(cookbook, learning_rate=LEARNING_RATE)
    assert finds_the_frequent_answer(run)
    assert run.output.count("stable_reinforce is computed by a formula of this server's own") == 1


def test_replies_may_end_at_a_text(base_cookbook):
    run = rl_loop(base_cookbook, learning_rate=LEARNING_RATE, loss_fn="importance_sampling")
    assert finds_the_frequent_answer(run)


def test_a_learning_rate_of_zero_finds_nothing(cookbook):
    run = rl_loop(cookbook, max_steps=8, learning_rate=0.0, loss_fn="importance_sampling")
    rewards = run.values("reward/total")
    assert max(rewards) <= 0.3
    assert abs(mean(rewards[-4:]) - mean(rewards[:4])) < 0.1
