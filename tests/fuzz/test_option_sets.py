"""Odd requests under every option: nothing falls, and a bystander sees nothing of it.

FUZZ_SEED and FUZZ_STORIES as in test_behind_the_door.py; FUZZ_SET_SECONDS bounds the run of each set.
"""

import os
from pathlib import Path

import pytest

from spmd_tx.config import ServerConfig
from tests.fuzz.fuzzing import Run, in_peace
from tests.fuzz.option_sets import EVERYWHERE, NOT_FUZZED, OPTION_SETS
from tests.fuzz.served import serving
from tests.fuzz.test_behind_the_door import ONLY, SEED, judge, parts

SECONDS = int(os.environ.get("FUZZ_SET_SECONDS", "60"))
STORIES = 16  # between two kills


def test_every_option_is_fuzzed_or_there_is_a_reason_why_not():
    fuzzed = {name for each in OPTION_SETS.values() for name in each.options} | set(EVERYWHERE)
    named = fuzzed | NOT_FUZZED.keys()
    assert named == set(ServerConfig.__struct_fields__), (
        "tests/fuzz/option_sets.py: put an option into OPTION_SETS, or into NOT_FUZZED with a reason"
    )
    assert not fuzzed & NOT_FUZZED.keys()
    assert all(len(reason) > 20 for reason in NOT_FUZZED.values())


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OPTION_SETS)
def test_nothing_falls_by_odd_requests_whatever_the_options(tmp_path: Path, name: str) -> None:
    chosen = OPTION_SETS[name]
    model_dir = chosen.write_model(tmp_path / "model")
    how = {"real": True, "options": chosen.options}
    with serving(tmp_path / "run", model_dir, None, **how) as served:
        stories = [ONLY, []] if ONLY else parts(SECONDS, STORIES)
        result = Run(served, tmp_path, SEED, rank=chosen.rank).go(stories)
    with serving(tmp_path / "peace", model_dir, None, **how) as served:
        peace = in_peace(served, result.rounds, chosen.rank)
    judge(result, peace, chosen.tolerance)
