"""The wire format of custom losses in JSON; the graph itself is read by spmd_tx/custom_loss.py."""

import msgspec

from spmd_tx.coordinator.wire_fields import Number
from spmd_tx.custom_loss import LossInput, WireGraph


class CreateCustomLossRequest(msgspec.Struct, frozen=True):
    session_id: str
    custom_loss_seq_id: Number
    name: str
    inputs: list[LossInput]  # logprobs first
    graph: WireGraph


class CreateCustomLossResult(msgspec.Struct, frozen=True, tag="create_custom_loss"):
    loss_id: str
