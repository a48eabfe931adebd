import pytest

from spmd_tx.cli.other_names import translated
from spmd_tx.errors import StartError


@pytest.mark.parametrize(
    "given, ours, about",
    [
        (
            "serve --base-model Qwen/Qwen3-4B --max-lora-adapters 3 --tensor-parallel-size 8 "
            "--train-micro-batch-size 1",
            "serve --base-model Qwen/Qwen3-4B --max-lora-adapters 3 --tensor-parallel-size 8",
            ["--train-tokens"],
        ),
        (
            "serve --base-model m --backend jax --no-enforce-eager --gradient-checkpointing --port 1",
            "serve --base-model m --port 1",
            ["one backend", "always compiled", "compute twice"],
        ),
        ("serve --session-timeout-sec=300 --port 1", "serve --session-timeout 300 --port 1", []),
        (
            "serve --limit stop_tokens=3 --batch-invariant",
            "serve --limit stop_tokens=3 --batch-invariant",
            [],
        ),
        ("plan --micro-batch-size 3", "plan --micro-batch-size 3", []),
        ("", "", []),
    ],
)
def test_options_are_taken_under_other_names(given, ours, about):
    arguments, notes = translated(given.split())
    assert arguments == ours.split()
    assert len(notes) == len(about)
    for part, note in zip(about, notes, strict=True):
        assert part in note


def test_the_configuration_of_a_backend_is_options():
    config = '{"max_lora_rank": 8, "enforce_eager": false, "sample_max_num_sequences": 64}'
    arguments, notes = translated(["serve", "--backend-config", config, "--port", "1"])
    assert arguments == ["serve", "--max-lora-rank", "8", "--port", "1"]
    assert [note.split()[0] for note in notes] == ["--no-enforce-eager", "--sample-max-num-sequences"]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_configuration_that_is_none_is_refused(text):
    with pytest.raises(StartError, match="JSON"):
        translated(["serve", "--backend-config", text])
