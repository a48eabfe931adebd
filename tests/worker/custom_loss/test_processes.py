from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np
import psutil
import pytest

from spmd_tx.worker.custom_loss.lanes import ChildProcess, LossLanes
from spmd_tx.worker.custom_loss.run import CustomLosses
from tests.custom_loss.recorded import recorded
from tests.sdk.server import COMPILED
from tests.support.forked import Forked
from tests.support.processes import command_line, until_ended
from tests.worker.custom_loss import loss_owner
from tests.worker.custom_loss.commands import SECONDS, Reports, command, limits
from tests.worker.custom_loss.whole_runs import run_all


def hungry(definition):
    """The same loss with one more metric, for which values of 64 MiB are gone through."""

    def node(target, *args, name):
        return {"op": "call_function", "name": name, "target": target, "args": list(args), "kwargs": {}}

    *nodes, output = definition["graph"]["nodes"]
    nodes += [
        node("torch.sum", {"ref": "logprobs"}, name="hungry_sum"),
        node("torch.full", [1 << 12, 1 << 11], 1.0, name="hungry_full"),
        node("operator.mul", {"ref": "hungry_full"}, {"ref": "hungry_sum"}, name="hungry_mul"),
        node("torch.cumsum", {"ref": "hungry_mul"}, 0, {"dtype": "float64"}, name="hungry_rows"),
        node("torch.cumsum", {"ref": "hungry_rows"}, 1, name="hungry_columns"),
        node("torch.mul", {"ref": "hungry_rows"}, {"ref": "hungry_columns"}, name="hungry_products"),
        node("torch.mean", {"ref": "hungry_products"}, name="hungry"),
    ]
    metrics = {"custom/hungry:mean": {"ref": "hungry"}}
    loss = output["args"][0]["tuple"][0]
    output = output | {"args": [{"tuple": [loss, {"dict": metrics}]}]}
    return msgspec.json.encode(definition | {"graph": definition["graph"] | {"nodes": [*nodes, output]}})


@contextmanager
def lanes_with(memory_bytes):
    """A lane with a real process, which ends with it."""
    reports, before = Reports(), set(losses_of_this_process())
    COMPILED.mkdir(parents=True, exist_ok=True)
    try:
        yield LossLanes(partial(ChildProcess, memory_bytes, str(COMPILED)), 1, reports), reports
    finally:
        for process in set(losses_of_this_process()) - before:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def real():
    with lanes_with(1 << 30) as real:
        yield real


def losses_of_this_process():
    children = psutil.Process().children()
    return [child for child in children if "spmd_tx.worker.custom_loss.process" in command_line(child)]


@pytest.mark.parametrize("case", ["dpo", pytest.param("top_k_entropy", marks=pytest.mark.slow)])
def test_another_process_gives_the_same_bits(real, case):
    lanes, reports = real
    lanes.submit(command(1, case))
    found = reports.end(1).arrays
    here = recorded()[case]
    names = [each["name"] for each in here.definition["inputs"]]
    expected = run_all(CustomLosses(), here.body, [[datum[name] for name in names] for datum in here.data])
    assert (found["losses"] == expected.losses_D).all()
    assert (found["metrics"] == expected.metrics_DM).all()
    assert (found["gradients"] == np.concatenate([each.ravel() for each in expected.gradients])).all()


def test_a_refusal_comes_with_its_reason(real):
    lanes, reports = real
    lanes.submit(command(2, limits=limits(operations=10)))
    end = reports.end(2)
    assert "at most 10 are allowed in one request (the limit custom_loss_operations)" in end.problem
    assert not end.is_given_up


def test_a_loss_that_needs_too_much_memory_fails_alone():
    with lanes_with(100 << 20) as (lanes, reports):
        lanes.submit(command(3))
        assert reports.end(3).problem is None
        large = command(4)
        lanes.submit(msgspec.structs.replace(large, definition=hungry(recorded()["dpo"].definition)))
        end = reports.end(4)
        assert "memory" in end.problem
        assert not end.is_ours
        lanes.submit(command(5))
        assert reports.end(5).problem is None


def test_a_process_that_is_killed_is_replaced(real):
    lanes, reports = real
    lanes.submit(command(4))
    assert reports.end(4).problem is None
    (process,) = losses_of_this_process()
    process.kill()
    process.wait()
    lanes.submit(command(5))
    assert reports.end(5).problem is None


def test_a_process_ends_with_its_worker_also_in_the_middle_of_a_compilation(tmp_path):
    with Forked(loss_owner.main, str(tmp_path), is_worker=True) as owner:
        while "compiling" not in owner.stdout.readline():
            pass
        (process,) = psutil.Process(owner.pid).children()
        owner.kill()
    until_ended([process], SECONDS)


def test_a_process_is_given_no_secret(real, monkeypatch):
    lanes, reports = real
    lanes.submit(command(6))
    assert reports.end(6).problem is None
    (process,) = losses_of_this_process()
    assert "SPMD_TX_SECRET" not in process.environ()
    assert process.nice() > psutil.Process().nice()
