"""The recipes on top of the cookbook's library for reinforcement learning: rl_basic and math_rl."""

import pytest

from tests.cookbook.cookbook import Cookbook, Run, mean

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]

SIZES = {"env": "gsm8k", "group_size": 8, "groups_per_batch": 8, "max_tokens": 12, "eval_every": 0}
LEARNING_RATE = 2e-3
# Half the mean square of the difference between the logprobs of the sampler and of the trainer.
SAME_WEIGHTS = 1e-9


def dataset_options(model: str, renderer: str) -> dict[str, object]:
    """Overriding a part of the builder needs all of it."""
    return {
        "dataset_builder": "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
        "dataset_builder__batch_size": 8,
        "dataset_builder__group_size": 8,
        "dataset_builder__renderer_name": renderer,
        "dataset_builder__model_name_for_tokenizer": model,
    }


def learned(cookbook: Cookbook, run: Run, steps: int) -> bool:
    """Whether right answers became more frequent; the numbers go to the report."""
    correct = run.values("env/all/correct")
    divergence = run.values("optim/kl_sample_train_v2")
    assert len(correct) == steps
    first, last = mean(correct[:3]), mean(correct[-3:])
    cookbook.report(
        f"{first:.2f} of the answers right in the first three steps, {last:.2f} in the last three "
        f"of {steps}; kl_sample_train_v2 at most {max(divergence):.1e}"
    )
    return first <= 0.25 and last >= first + 0.2


def test_rl_basic_learns_and_evaluates(cookbook):
    model = cookbook.server.model
    run = cookbook.run(
        "rl_basic",
        **dataset_options(model, "qwen3"),
        learning_rate=LEARNING_RATE,
        max_tokens=12,
        max_steps=14,
        eval_every=13,
        save_every=6,
    )
    assert learned(cookbook, run, 14)
    assert max(run.values("optim/kl_sample_train_v2")) < SAME_WEIGHTS
    scores = run.values("test/env/all/correct")
    assert len(scores) == 3  # before steps 0 and 13, and in the end
    assert scores[-1] >= scores[0] + 0.2
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["000006", "000012", "final"]


def test_rl_basic_stops_at_a_text(base_cookbook):
    run = base_cookbook.run(
        "rl_basic",
        **dataset_options(base_cookbook.server.model, "role_colon"),
        learning_rate=LEARNING_RATE,
        max_tokens=24,
        max_steps=3,
        save_every=0,
    )
    well_formed, tokens = run.values("env/all/format"), run.values("env/all/ac_tokens_per_turn")
    base_cookbook.report(
        f"{min(well_formed):.0%} of the replies end at the text, after {mean(tokens):.1f} tokens"
    )
    assert min(well_formed) >= 0.9  # well-formed: the text stands in the reply once, and at its end
    assert max(tokens) < 16
    assert max(run.values("optim/kl_sample_train_v2")) < SAME_WEIGHTS


def test_math_rl_takes_its_steps_in_turn(cookbook):
    """With two optimizer steps per batch: the second one is already off-policy, which ppo is made for."""
    run = cookbook.run(
        "math_rl.train",
        **SIZES,
        learning_rate=1e-3,
        max_steps=14,
        loss_fn="ppo",
        num_substeps=2,
        save_every=0,
        compute_post_kl=True,
    )
    assert learned(cookbook, run, 14)
    assert min(run.values("kl_pre_post_v2")) > 1e-6  # a sampler made after the step has other weights


def test_math_rl_trains_with_its_default_loss(cookbook):
    run = cookbook.run("math_rl.train", **SIZES, learning_rate=LEARNING_RATE, max_steps=14, save_every=0)
    assert learned(cookbook, run, 14)
    assert max(run.values("optim/kl_sample_train_v2")) < SAME_WEIGHTS


def test_math_rl_samples_ahead_of_training(cookbook):
    run = cookbook.run(
        "math_rl.train",
        **SIZES,
        learning_rate=1e-3,
        max_steps=20,
        max_steps_off_policy=2,
        save_every=5,
    )
    assert learned(cookbook, run, 20)
    assert max(run.values("async/staleness_max")) >= 2
    # Of weights as old as that, the logprobs differ; of the present ones they do not.
    assert max(run.values("optim/kl_sample_train_v2")) > SAME_WEIGHTS


def test_math_rl_trains_on_minibatches_while_others_are_sampled(cookbook):
    run = cookbook.run(
        "math_rl.train",
        **SIZES,
        stream_minibatch_config__groups_per_batch=8,
        stream_minibatch_config__num_minibatches=2,
        learning_rate=LEARNING_RATE,
        max_steps=14,
        save_every=0,
        loss_fn="importance_sampling",
    )
    assert learned(cookbook, run, 14)
    assert max(run.values("optim/kl_sample_train_v2")) < SAME_WEIGHTS
