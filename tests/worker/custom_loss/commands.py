"""Commands for custom losses, and what lanes report."""

import queue

import numpy as np

from spmd_tx.custom_loss.limits import LossLimits
from spmd_tx.protocol.commands import CustomLoss
from spmd_tx.protocol.reports import CustomLossEnd
from tests.custom_loss.recorded import recorded

SECONDS = 60  # until a test gives up

PLENTY = LossLimits(
    operations_per_datum=1e12, operations=1e12, programs=64, compile_seconds=1e6, run_seconds=1e6
)


def limits(**changes):
    return LossLimits(**{name: getattr(PLENTY, name) for name in PLENTY.__struct_fields__} | changes)


def command(number, case="dpo", tenant="alice", limits=PLENTY):
    """What the coordinator sends for the recorded datums."""
    case = recorded()[case]
    names = [each["name"] for each in case.definition["inputs"]]
    columns = [[datum[name] for datum in case.data] for name in names]
    return CustomLoss(
        number=number,
        tenant=tenant,
        definition=case.body,
        lengths=np.array([len(datum["logprobs"]) for datum in case.data], np.int32),
        widths=np.array([[each.shape[1] if each.ndim == 2 else 0 for each in column] for column in columns]),
        values=[np.concatenate([each.ravel() for each in column]) for column in columns],
        limits=limits,
    )


class Reports:
    """What lanes report, as the coordinator would hear it."""

    def __init__(self):
        self.heard = queue.Queue()

    def __call__(self, kind, **fields):
        self.heard.put(kind(generation=1, process=0, **fields))

    def next(self):
        return self.heard.get(timeout=SECONDS)

    def end(self, number=None):
        """Of the run, or the next one, passing over news."""
        while not isinstance(report := self.next(), CustomLossEnd) or number not in (None, report.number):
            pass
        return report
