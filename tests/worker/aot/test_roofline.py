"""What time operations take, and what follows from it."""

import re
from pathlib import Path

import pytest

from spmd_tx.hlo.collectives import Collective
from spmd_tx.hlo.cost import Cost, DeviceOperation
from spmd_tx.models.attention import flash, flash_triton
from spmd_tx.worker.aot.predict import ANSWER_TOKENS, ANSWERS, PROMPT_TOKENS, PROMPTS, predict
from spmd_tx.worker.aot.report import ProgramReport
from spmd_tx.worker.aot.roofline import ATTENTION, Speeds, crosses_hosts, seconds
from spmd_tx.worker.memory.accelerators import ACCELERATORS

SPEEDS = Speeds(flops=100.0, bandwidth=10.0, links=4.0, network=1.0)
ONE_HOST = [0] * 8
TWO_HOSTS = [0] * 4 + [1] * 4


def operation(times=1.0, source="", **different) -> DeviceOperation:
    return DeviceOperation(name="x", op="fusion", type="", source=source, times=times, **different)


def gather(groups, is_asynchronous=False, size=8.0) -> DeviceOperation:
    return operation(collective=Collective("all-gather", "f32", size, groups, is_asynchronous))


def test_the_slower_of_arithmetic_and_traffic_counts_for_each_operation():
    operations = (operation(flops=200.0, read_bytes=5.0), operation(times=3, flops=1.0, written_bytes=10.0))
    assert seconds(Cost(operations), SPEEDS, ONE_HOST) == 2 + 3 * 1


def test_no_operation_is_faster_than_its_launch():
    speeds = Speeds(100.0, 10.0, 4.0, 1.0, launch=0.5)
    assert seconds(Cost((operation(times=4, flops=1.0),)), speeds, ONE_HOST) == 2


def test_kernels_of_attention_to_rows_have_their_own_speed():
    speeds = Speeds(100.0, 10.0, 4.0, 1.0, attention=25.0)
    for name, spent in (("attention_forward", 4), ("attention_grad_keys", 4), ("paged_attention", 1)):
        kernel = operation(
            flops=100.0, source=f"jit(f)/transpose(jvp())/costs_1_flops_2_bytes/{name}/pallas_call"
        )
        assert seconds(Cost((kernel,)), speeds, ONE_HOST) == spent
        assert seconds(Cost((kernel,)), SPEEDS, ONE_HOST) == 1


@pytest.mark.parametrize("attention", [flash, flash_triton])
def test_the_kernels_have_the_names_by_which_they_are_known(attention):
    written = re.findall(r"\"(attention_\w+)\"", Path(attention.__file__).read_text())
    assert len(written) == 3
    assert all(ATTENTION.search(f"jit(f)/{name}/pallas_call") for name in written)


def test_messages_between_hosts_are_slower():
    near, far = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5))
    assert seconds(Cost((gather(near),)), SPEEDS, TWO_HOSTS) == 0.75 * 8 / 4
    assert seconds(Cost((gather(far),)), SPEEDS, TWO_HOSTS) == 0.5 * 8 / 1
    assert not crosses_hosts(gather(near), TWO_HOSTS)
    assert crosses_hosts(gather(far), TWO_HOSTS)


def test_what_runs_beside_others_costs_what_they_do_not_cover():
    work = operation(times=1, flops=100.0)
    groups = ((0, 1),)
    assert seconds(Cost((work, gather(groups, is_asynchronous=True))), SPEEDS, ONE_HOST) == 1
    assert seconds(Cost((work, gather(groups, is_asynchronous=True, size=80.0))), SPEEDS, ONE_HOST) == 10
    assert seconds(Cost((work, gather(groups))), SPEEDS, ONE_HOST) == 2


@pytest.mark.parametrize("kind", [name for name, each in ACCELERATORS.items() if each.flops])
def test_nothing_is_expected_to_be_faster_than_the_vendor_says(kind):
    peak, expected = Speeds.peak(ACCELERATORS[kind]), Speeds.expected(ACCELERATORS[kind])
    for name in ("flops", "bandwidth", "links", "network"):
        assert 0 < getattr(expected, name) < getattr(peak, name)


def program(kind, seconds, tokens=0) -> ProgramReport:
    return ProgramReport(name=kind, kind=kind, expected_seconds=seconds, tokens=tokens, is_usual=True)


def test_an_iteration_samples_and_trains():
    programs = [
        program("train", 2.0, tokens=PROMPTS * ANSWERS * (PROMPT_TOKENS + ANSWER_TOKENS) // 8),
        program("prefill", 0.5, tokens=PROMPTS * PROMPT_TOKENS // 4),
        program("decode", 0.01, tokens=PROMPTS * ANSWERS // 2),
        program("optim_step", 0.25),
    ]
    told = predict(programs)
    assert told is not None
    assert told.iteration_training_seconds == pytest.approx(8 * 2.0 + 0.25)
    assert told.iteration_sampling_seconds == pytest.approx(4 * 0.5 + 2 * ANSWER_TOKENS * 0.01)
    assert told.iteration_seconds == told.iteration_training_seconds + told.iteration_sampling_seconds
    assert told.decode_tokens == pytest.approx(PROMPTS * ANSWERS / 2 / 0.01)


def test_nothing_is_predicted_without_one_of_the_programs():
    assert predict([program("train", 2.0, tokens=1)]) is None
