"""The optimizers that adapters can have, by the command of their steps."""

from collections.abc import Mapping
from typing import Any

from spmd_tx.protocol.commands import DimuonStep, OptimStep
from spmd_tx.worker.steps.adamw import ADAMW
from spmd_tx.worker.steps.dimuon import DIMUON
from spmd_tx.worker.steps.optimizer import UpdateRule

OPTIMIZERS: Mapping[Any, UpdateRule] = {OptimStep: ADAMW, DimuonStep: DIMUON}
