"""The distillation recipes: from a teacher's logprobs, from its best tokens, and from texts."""

import pytest

from tests.cookbook.cookbook import Run, mean

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]


def sampler_path(teacher: Run) -> str:
    return teacher.checkpoints[-1]["sampler_path"]


def test_on_policy_distillation_comes_closer_to_its_teacher(cookbook):
    """The teacher has learnt to answer in a word; its student says one to six at first."""
    teacher = cookbook.run(
        "preference.shorter.train",
        "teacher",
        renderer_name="qwen3",
        batch_size=4,
        group_size=8,
        max_tokens=16,
        learning_rate=2e-3,
        max_steps=8,
        eval_every=0,
    )
    cookbook.report("the teacher of the next line")
    run = cookbook.run(
        "distillation.on_policy_distillation",
        teacher_model=cookbook.server.model,
        teacher_checkpoint=sampler_path(teacher),
        dataset="deepmath",
        lora_rank=32,
        group_size=4,
        groups_per_batch=8,
        max_tokens=16,
        learning_rate=1e-3,
        max_steps=12,
        eval_every=0,
        save_every=0,
    )
    divergence, lengths = run.values("teacher_kl"), run.values("env/all/ac_tokens_per_turn")
    cookbook.report(
        f"KL to the teacher {divergence[0]:.2f} -> {divergence[-1]:.2f} nats per token; "
        f"{lengths[0]:.1f} -> {lengths[-1]:.1f} tokens per reply"
    )
    assert len(divergence) == 12
    assert mean(divergence[-3:]) < divergence[0] / 2
    assert mean(lengths[-3:]) < lengths[0] - 1
    assert max(run.values("optim/kl_sample_train_v2")) < 1e-9


def test_off_policy_distillation_from_the_best_tokens_of_a_teacher(cookbook):
    teacher = cookbook.run(
        "sl_loop", "teacher", batch_size=16, max_steps=24, learning_rate=4e-3, save_every=0
    )
    cookbook.report("the teacher of the next line")
    run = cookbook.run(
        "distill_off_policy.py",
        teacher_checkpoint=sampler_path(teacher),
        batch_size=16,
        n_teacher_targets=8,
        learning_rate=4e-3,
        max_steps=16,
    )
    losses = run.values("train/loss:sum")
    cookbook.report(
        f"cross entropy to 8 tokens of the teacher, per batch: {losses[0]:.0f} -> {losses[-1]:.0f}"
    )
    assert len(losses) == 16
    assert losses[-1] < losses[0] / 2


def test_off_policy_reasoning_learns_from_a_stream_of_texts(cookbook):
    run = cookbook.run(
        "distillation.off_policy_reasoning",
        renderer_name="qwen3",
        lora_rank=32,
        batch_size=16,
        learning_rate=4e-3,
        max_steps=10,
        buffer_size=100,
        max_prompts=256,
        eval_every=0,
        save_every=0,
    )
    losses = run.values("train_mean_nll")
    cookbook.report(f"NLL {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 2
