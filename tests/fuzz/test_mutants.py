"""What the fuzzer is for: a parser that is broken for one rare value is found by it."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from tests.fuzz.alice import Note, differences
from tests.fuzz.calls import PROTOBUF, Names
from tests.fuzz.conftest import ROUNDS
from tests.fuzz.fuzzing import Run
from tests.fuzz.serve import RARE
from tests.fuzz.served import serving
from tests.fuzz.stories import told

SEED = 1


def _shapes(story: int) -> Iterator[list[int]]:
    """Those of the tensors that a story sends."""
    for call in told(SEED, story, Names()):
        if call.content_type == PROTOBUF and call.body is not None:
            try:
                batch = pb.ForwardBackwardRequest.FromString(call.body)
            except DecodeError:
                continue
            for datum in batch.data:
                yield from (list(tensor.shape) for tensor in datum.loss_fn_inputs.values())


@pytest.fixture(scope="module")
def stories() -> range:
    """Four, of which the third has the rare value."""
    rare = next(story for story in count(2) if any(RARE in shape for shape in _shapes(story)))
    return range(rare - 2, rare + 2)


def test_a_parser_that_raises_is_found_and_harms_its_request_only(
    model_dir: Path, peace: list[Note], tmp_path: Path, stories: range
) -> None:
    with serving(tmp_path / "run", model_dir, None, mutant="raises") as served:
        result = Run(served, tmp_path, SEED, ROUNDS).go([stories])
    found = "\n".join(result.problems(peace))
    assert "its future failed by the server" in found
    assert "KeyError: 4096" in found
    assert differences(peace, result.notes) == []
    assert len(result.notes) == len(peace)


@pytest.mark.fuzz
@pytest.mark.parametrize("mutant", ["exits", "hangs"])
def test_a_parser_that_ends_the_server_is_found_and_its_request_is_given_up(
    model_dir: Path, tmp_path: Path, mutant: str, stories: range
) -> None:
    with serving(tmp_path / "run", model_dir, None, mutant=mutant) as served:
        result = Run(served, tmp_path, SEED, ROUNDS).go([stories])
        assert result.findings[0].startswith("the server died" if mutant == "exits" else "the server hung")
        assert any(served.start() and served.stays() for _ in range(3))
