"""The supervised recipes: sl_loop, sl_basic, and chat_sl with checkpoints to resume from."""

import json
import time

import pytest

from tests.cookbook.cookbook import HERE, PYTHON, Cookbook, Run, run_python

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]

BATCH = 16


def test_sl_loop_starts_at_the_loss_of_the_base_model_and_learns(cookbook):
    command = [PYTHON, str(HERE / "base_model_loss.py"), cookbook.server.model, str(BATCH)]
    expected = float(run_python(cookbook.environment, command).splitlines()[-1])
    run = cookbook.run("sl_loop", batch_size=BATCH, max_steps=20, learning_rate=2e-3, save_every=0)
    losses = run.values("train_mean_nll")
    cookbook.report(
        f"NLL of the base model {expected:.4f}, of step 0 {losses[0]:.4f}, of step 19 {losses[-1]:.4f}"
    )
    assert len(losses) == 20
    assert losses[0] == pytest.approx(expected, abs=1e-3)
    assert losses[-1] < losses[0] - 2


def test_sl_basic_lowers_the_loss_of_rows_it_did_not_see(cookbook):
    builder = {
        "dataset_builder": "tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder",
        "dataset_builder__common_config__model_name_for_tokenizer": cookbook.server.model,
        "dataset_builder__common_config__renderer_name": "qwen3",
        "dataset_builder__common_config__batch_size": BATCH,
        "dataset_builder__common_config__max_length": 512,
    }
    run = cookbook.run("sl_basic", **builder, learning_rate=4e-3, max_steps=13, eval_every=6)
    losses, of_tests = run.values("train_mean_nll"), run.values("test/nll")
    cookbook.report(
        f"NLL {losses[0]:.3f} -> {losses[-1]:.3f}; of test rows {of_tests[0]:.3f} -> {of_tests[-1]:.3f}"
    )
    assert len(losses) == 13
    assert len(of_tests) == 3
    # The sampler scores the test rows, the trainer the training rows, both of the same kind.
    assert of_tests[0] == pytest.approx(losses[0], rel=0.05)
    assert of_tests[-1] == pytest.approx(losses[-1], rel=0.1)
    assert of_tests[-1] < of_tests[0] - 2
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["final"]


def test_chat_sl_resumes_from_a_rolling_checkpoint_after_a_kill(cookbook):
    """Rolling checkpoints after steps 4 and 12; a periodic one takes the place of that after 8."""
    options = {"batch_size": BATCH, "learning_rate": 2e-3, "lr_schedule": "constant", "max_steps": 14}
    options |= {
        "save_every": 8,
        "rolling_save_every": 4,
        "eval_every": 1,
        "behavior_if_log_dir_exists": "resume",
    }
    killed = kill_after_step(cookbook, 6, "chat_sl.train", **options)
    last = killed.checkpoints[-1]
    assert (last["name"], last["rolling"]) == ("000004", True)
    scores = {step["step"]: step["test/nll"] for step in killed.steps}

    resumed = cookbook.run("chat_sl.train", **options)
    first = next(step for step in resumed.steps if step["step"] == 4)
    # The recipe has sent two batches when it saves, so step 4 starts with what had been there at step 6.
    assert first["test/nll"] == pytest.approx(scores[6], abs=1e-5)
    assert abs(first["test/nll"] - scores[5]) > 1e-2  # steps are further apart than that
    assert [step["step"] for step in resumed.steps] == list(range(14))
    assert f"Resumed training from {last['state_path']}" in resumed.output
    cookbook.report(
        f"killed after step 6 and resumed at step 4 with a test NLL of {first['test/nll']:.5f}; with the "
        f"saved weights it had been {scores[6]:.5f}; {resumed.steps[-1]['test/nll']:.3f} at step 13"
    )

    # Nobody was left to delete this one. It will expire.
    assert checkpoints_of(cookbook, last) == {"weights/000004"}
    # Of the rolling checkpoint after step 12 nothing is left.
    names = {"weights/000008", "sampler_weights/000008", "weights/final", "sampler_weights/final"}
    assert checkpoints_of(cookbook, resumed.checkpoints[-1]) == names


def kill_after_step(cookbook: Cookbook, step: int, program: str, **options) -> Run:
    run = Run(cookbook.folder / "log")
    process = cookbook.start(program, "log", **options)
    metrics = run.folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") <= step:
        assert process.poll() is None, (cookbook.folder / "log.out").read_text()[-8000:]
        time.sleep(0.02)
    process.kill()
    process.wait()
    return run


def checkpoints_of(cookbook: Cookbook, checkpoint: dict) -> set[str]:
    """Those of the same model, as the command line of the SDK lists them."""
    run_id = checkpoint["state_path"].removeprefix("tinker://").split("/")[0]
    command = [PYTHON, "-m", "tinker.cli", "--format", "json", "checkpoint", "list", "--run-id", run_id]
    listed = json.loads(run_python(cookbook.environment, command))
    return {checkpoint["checkpoint_id"] for checkpoint in listed["checkpoints"]}
