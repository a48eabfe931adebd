"""The recipes that need several base models, with the names they have by default, against one server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_tx.demo.run import ServerLog
from tests.cookbook.conftest import uncomplaining
from tests.cookbook.cookbook import PYTHON, Cookbook, Served, mean, run_python
from tests.sdk.server import Server

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]

SMALLER = "Qwen/Qwen3.5-4B"
# Each group is one line of --group.
GROUPS = [
    "name=base,base_model=Qwen/Qwen3.5-9B-Base",
    "name=instructed,base_model=Qwen/Qwen3.5-9B",
    "name=mathematics,base_model=Qwen/Qwen3.6-27B,role=sample",
    "name=people,base_model=Qwen/Qwen3.5-397B-A17B,role=sample",
    "name=judge,base_model=Qwen/Qwen3.6-35B-A3B,role=sample",
]
SAME_WEIGHTS = 1e-9  # of kl_sample_train_v2

WRITE_SUMS = """
import sys
from tinker_cookbook.recipes.rubric.generate_data import generate_dataset
generate_dataset(num_train=200, num_test=8, seed=42, write_dir=sys.argv[1])
"""


@pytest.fixture(scope="module")
def server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server with six base models, of which three are trained."""
    options = {"served_model_name": SMALLER, "max_context_length": 1024, "train_tokens": 4096}
    options |= {"decode_rows": 64, "max_lora_rank": 128, "group": GROUPS}
    data_dir = tmp_path_factory.mktemp("groups") / "data"
    running = Server(Path(SMALLER), data_dir, environment=environment, **options)
    try:
        running.wait_until_ready()
        yield Served(running.url, "", ServerLog(running.log_path))
    finally:
        running.close()


@pytest.fixture
def cookbook(
    server: Served, environment: dict[str, str], tmp_path: Path, pytestconfig: pytest.Config
) -> Iterator[Cookbook]:
    yield from uncomplaining(server, environment, tmp_path, pytestconfig)


def test_a_student_comes_closer_to_the_other_model_that_teaches_it(cookbook):
    run = cookbook.run(
        "distillation.on_policy_distillation",
        groups_per_batch=16,
        max_tokens=20,
        learning_rate=2e-3,
        max_steps=30,
        eval_every=0,
        save_every=0,
    )
    divergence = run.values("teacher_kl")
    assert len(divergence) == 30
    first, last = mean(divergence[:3]), mean(divergence[-5:])
    cookbook.report(f"KL to the teacher {first:.2f} -> {last:.2f} nats per token")
    assert last < first / 3
    assert max(run.values("optim/kl_sample_train_v2")) < SAME_WEIGHTS


def test_a_student_comes_closer_to_both_of_its_teachers(cookbook):
    run = cookbook.run(
        "distillation.on_policy_multi_teacher",
        deepmath_groups_per_batch=8,
        tulu3_groups_per_batch=8,
        max_tokens=32,
        learning_rate=2e-3,
        max_steps=40,
        eval_every=0,
        save_every=0,
    )
    told = []
    for number in (0, 1):
        divergence = run.values(f"teacher_kl/dataset_{number}")
        assert len(divergence) == 40
        first, last = mean(divergence[:3]), mean(divergence[-5:])
        told.append(f"{first:.2f} -> {last:.2f}")
        assert last < first / 2
    cookbook.report(f"KL to the teachers {told[0]} and {told[1]} nats per token")
    assert max(run.values("optim/kl_sample_train_v2")) < SAME_WEIGHTS


def test_a_policy_learns_what_another_model_gives_points_for(cookbook):
    run_python(cookbook.environment, [PYTHON, "-c", WRITE_SUMS, str(cookbook.folder)])
    run = cookbook.run(
        "rubric.train",
        train_jsonl_path=cookbook.folder / "example_rubric_train.jsonl",
        test_jsonl_path=cookbook.folder / "example_rubric_test.jsonl",
        groups_per_batch=8,
        train_group_size=8,
        learning_rate=4e-3,
        max_steps=14,
        eval_every=0,
        save_every=0,
    )
    points = run.values("env/all/rubric_score")
    first, last = mean(points[:3]), mean(points[-3:])
    cookbook.report(f"{first:.2f} points in the first three steps, {last:.2f} in the last three of 14")
    assert len(points) == 14
    assert last >= first + 0.2
    assert max(run.values("optim/kl_sample_train_v2")) < SAME_WEIGHTS


def test_a_player_wins_some_games_against_another_model(cookbook):
    run = cookbook.run(
        "multiplayer_rl.twenty_questions.train",
        batch_size=1,
        group_size=16,
        learning_rate=1e-3,
        max_steps=2,
        eval_every=0,
        save_every=0,
    )
    won, turns = (run.values(f"env/all/{name}") for name in ("reward/total", "turns_per_episode"))
    cookbook.report(f"{mean(won):.0%} of the games won, after {mean(turns):.1f} turns")
    assert len(won) == 2
    assert 0 < mean(won) < 0.8
    assert max(run.values("optim/kl_sample_train_v2")) < SAME_WEIGHTS
