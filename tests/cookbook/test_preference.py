"""The recipes that learn from preferences: dpo, whose loss is a function of the client, and shorter."""

import math

import pytest

from tests.cookbook.cookbook import mean

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]


def test_dpo_starts_at_its_reference_and_learns_to_tell_the_pairs_apart(cookbook):
    run = cookbook.run("preference.dpo.train", batch_size=8, max_steps=8, learning_rate=2e-3)
    losses, margins, accuracy = (run.values(name) for name in ("dpo_loss", "margin", "accuracy"))
    cookbook.report(
        f"loss {losses[0]:.5f} -> {losses[-1]:.3f}, margin {margins[0]:.1e} -> {margins[-1]:.2f}, "
        f"{accuracy[-1]:.0%} of the pairs told apart"
    )
    assert len(losses) == 8
    # The policy is its own reference at first: no margin, whatever the data.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(margins[0]) < 1e-5
    assert losses[-1] < 0.4
    assert accuracy[-1] >= 0.9
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["final"]


def test_shorter_makes_replies_shorter(cookbook):
    run = cookbook.run(
        "preference.shorter.train",
        renderer_name="qwen3",
        batch_size=4,
        group_size=8,
        max_tokens=16,
        learning_rate=2e-3,
        max_steps=10,
        eval_every=0,
    )
    lengths = run.values("env/all/ac_tokens_per_turn")
    first, last = mean(lengths[:2]), mean(lengths[-2:])
    cookbook.report(f"{first:.1f} tokens per reply in the first two steps, {last:.1f} in the last two of 10")
    assert len(lengths) == 10
    assert last < first - 1.5
    assert max(run.values("optim/kl_sample_train_v2")) < 1e-9
