"""recipes/rl_loop.py: its losses, and replies that end at a token or at a text."""

import pytest

from tests.cookbook.cookbook import Cookbook, mean

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]

SIZES = {"batch_size": 8, "group_size": 8, "max_tokens": 12, "save_every": 0}


def rewards_of(cookbook: Cookbook, steps: int, **options) -> list[float]:
    run = cookbook.run("rl_loop", max_steps=steps, **SIZES, **options)
    rewards = run.values("reward/total")
    assert len(rewards) == steps
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["final"]
    first, last = mean(rewards[:4]), mean(rewards[-4:])
    cookbook.report(
        f"mean reward {first:.2f} in the first four steps, {last:.2f} in the last four of {steps}"
    )
    return rewards


def finds_the_frequent_answer(rewards: list[float]) -> bool:
    """Drawn at random, an answer is right one time in ten; the frequent one is right in seven of ten."""
    return mean(rewards[:4]) <= 0.25 and mean(rewards[-4:]) >= 0.5


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
def test_each_loss_finds_the_frequent_answer(cookbook, loss):
    assert finds_the_frequent_answer(rewards_of(cookbook, 24, learning_rate=2e-3, loss_fn=loss))


def test_the_default_loss_finds_the_frequent_answer(cookbook):
    assert finds_the_frequent_answer(rewards_of(cookbook, 24, learning_rate=2e-3))


def test_replies_may_end_at_a_text(base_cookbook):
    rewards = rewards_of(base_cookbook, 24, learning_rate=2e-3, loss_fn="importance_sampling")
    assert finds_the_frequent_answer(rewards)


def test_a_learning_rate_of_zero_finds_nothing(cookbook):
    rewards = rewards_of(cookbook, 8, learning_rate=0.0, loss_fn="importance_sampling")
    assert max(rewards) <= 0.3
    assert abs(mean(rewards[-4:]) - mean(rewards[:4])) < 0.1
