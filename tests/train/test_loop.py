from types import SimpleNamespace
from typing import get_args

import pytest

from spmd_tx.protocol.optimizers import OptimizerName
from spmd_tx.train.folder import RunFolder
from spmd_tx.train.loop import Schedule, train
from spmd_tx.train.optimizers import OPTIMIZERS


@pytest.mark.parametrize(
    "shape, rates",
    [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]), ("cosine", [1, 0.854, 0.5, 0.146])],
)
def test_the_learning_rate_falls_as_it_is_told(shape, rates):
    schedule = Schedule(4, OPTIMIZERS["adamw"], 1.0, shape, 1, 1)
    assert [schedule.rate(step) for step in range(4)] == pytest.approx(rates, abs=1e-3)


def test_the_optimizers_are_those_of_the_server():
    assert tuple(OPTIMIZERS) == get_args(OptimizerName)


class Recorded:
    """A trainer and a kind of training that note what is sent, and what is waited for."""

    main = "loss"

    def __init__(self):
        self.events = []

    def _waited(self, what, result):
        self.events.append(f"send {what}")

        def wait():
            self.events.append(f"wait {what}")
            return result

        return wait

    def send(self, step, params):
        return self._waited(step, {"loss": float(step)})

    def evaluate(self):
        return self._waited("eval", {"eval/loss": 0.0})

    def save_state(self, name):
        return SimpleNamespace(result=self._waited(name, SimpleNamespace(path=name)))

    def save_weights_for_sampler(self, name):
        return SimpleNamespace(result=self._waited(name, SimpleNamespace(path=name)))


def test_a_step_is_sent_before_the_one_before_it_is_awaited(tmp_path):
    recorded, shown, forgotten = Recorded(), [], []
    folder = RunFolder(tmp_path, {})
    schedule = Schedule(4, OPTIMIZERS["adamw"], 1.0, "constant", save_every=2, eval_every=4)
    train(recorded, recorded, schedule, folder, lambda step, _: shown.append(step), forgotten.append)
    events = recorded.events
    assert events.index("send 1") < events.index("wait 0")
    assert events.index("send step-000002") < events.index("send 2") < events.index("wait step-000002")
    assert shown == [0, 0, 1, 2, 3, 3]
    assert forgotten == ["step-000002"]
    assert (folder.place.step, folder.place.state, folder.place.final) == (4, "step-000004", "final")


def test_a_run_whose_last_words_are_missing_only_says_them(tmp_path):
    recorded, folder = Recorded(), RunFolder(tmp_path, {})
    folder.save(4, "step-000004")
    train(recorded, recorded, Schedule(4, OPTIMIZERS["adamw"], 1.0, "linear", 2, 2), folder, print, print)
    assert recorded.events == ["send final", "wait final"]
    assert (folder.place.state, folder.place.final) == ("step-000004", "final")
