"""A worker process without JAX whose device keeps real state: hashes of all that was done to it."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from spmd_tx.custom_loss import definition
from spmd_tx.protocol import reports
from spmd_tx.protocol.commands import AnyCommand, CustomLoss, PackedRows
from spmd_tx.protocol.setup import Setup
from tests.coordinator.mesh import fake_worker
from tests.coordinator.recovery.replay_device import ReplayDevice


class FuzzDevice(ReplayDevice):
    """Also takes several targets per position, and custom losses, whose values it makes up."""

    def __init__(self, setup: Setup, report: Callable[..., None]) -> None:
        super().__init__(fake_worker.PAGES, setup.page_size)
        self._report = report

    def execute(self, command: AnyCommand) -> tuple[dict, dict]:
        if isinstance(command, CustomLoss):
            self._report(reports.CustomLossEnd, number=command.number, arrays=_made_up(command))
            return {}, {}
        reply = super().execute(command)
        unwritten, self.unwritten = self.unwritten, []
        for path, write in unwritten:
            write(Path(path))
            self._report(reports.Written, path=path)
        return reply

    def _score(self, rows: PackedRows, with_gradients: bool) -> dict[str, np.ndarray]:
        arrays = super()._score(rows, with_gradients)
        if rows.targets.ndim == 2:
            return arrays
        wide = np.repeat(arrays["logprobs"][..., None], rows.targets.shape[2], 2)
        return {"logprobs": wide, "losses": arrays["losses"]}


def _made_up(command: CustomLoss) -> dict[str, np.ndarray]:
    loss = definition.read(definition.decode(command.definition))
    datums = len(command.lengths)
    return {
        "losses": np.ones(datums),
        "metrics": np.ones((datums, len(loss.metrics))),
        "gradients": np.ones(len(command.values[0]), np.float32),
    }


if __name__ == "__main__":
    sys.exit(fake_worker.main(FuzzDevice, fails=()))
