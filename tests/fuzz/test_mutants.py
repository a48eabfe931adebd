"""What the fuzzer is for: a parser that is broken for one rare value is found by it."""

from pathlib import Path

import pytest

from tests.fuzz.alice import Note, differences
from tests.fuzz.conftest import ROUNDS
from tests.fuzz.fuzzing import Run
from tests.fuzz.served import serving

SEED = 1
STORIES = range(10, 18)  # among which is one with the rare value


def test_a_parser_that_raises_is_found_and_harms_its_request_only(
    model_dir: Path, peace: list[Note], tmp_path: Path
) -> None:
    with serving(tmp_path / "run", model_dir, None, mutant="raises") as served:
        result = Run(served, tmp_path, SEED, ROUNDS).go([STORIES])
    found = "\n".join(result.problems(peace))
    assert "its future failed by the server" in found
    assert "KeyError: 4096" in found
    assert differences(peace, result.notes) == []
    assert len(result.notes) == len(peace)


@pytest.mark.fuzz
@pytest.mark.parametrize("mutant", ["exits", "hangs"])
def test_a_parser_that_ends_the_server_is_found_and_its_request_is_given_up(
    model_dir: Path, tmp_path: Path, mutant: str
) -> None:
    with serving(tmp_path / "run", model_dir, None, mutant=mutant) as served:
        result = Run(served, tmp_path, SEED, ROUNDS).go([STORIES])
        assert result.findings[0].startswith("the server died" if mutant == "exits" else "the server hung")
        assert any(served.start() and served.stays() for _ in range(3))
