"""A stand-in for the sample batch, and sample requests for it."""

import numpy as np

from spmd_tx.coordinator.requests.records import Finished
from spmd_tx.coordinator.sampling.dispatch import Dispatch
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest
from spmd_tx.protocol.commands import STOP_TOKENS, Decode


class FakeSampling:
    """Every request takes a number of Decodes, one at a time."""

    def __init__(self):
        self.admitted = {}
        self.obstacles = {}
        self.decodes = 1  # per request
        self.rows = 64
        self.before = []  # commands that the next Decode needs
        self._left = {}
        self._is_out = False

    def admit(self, request_id, body, version, grammar=None, images=None):
        self.admitted[request_id] = version
        self._left[request_id] = self.decodes

    def unanswered(self):
        return {}

    @property
    def planned_for(self):
        return set(self._left)

    def start_over(self, lonely):
        self._is_out = False
        return []

    def program_requests(self):
        return []

    def cancel(self, request_id):
        self._left.pop(request_id, None)

    def take_dropped(self):
        return []

    def waiting(self):
        return bool(self._left)

    @property
    def may_send(self):
        return bool(self._left) and not self._is_out

    def status(self, request_id):
        return self.obstacles.get(request_id)

    def next_dispatch(self):
        if self._is_out or not self._left:
            return None
        if self.before:
            return Dispatch(self.before.pop(0), lambda _: [])
        self._is_out = True
        request_id = next(iter(self._left))
        return Dispatch(decode(self.rows), lambda _: self._absorb(request_id))

    def _absorb(self, request_id):
        self._is_out = False
        if request_id not in self._left:
            return []
        self._left[request_id] -= 1
        if self._left[request_id]:
            return []
        del self._left[request_id]
        return [(request_id, Finished("application/x-protobuf", b""))]


def decode(rows):
    integers = np.zeros(rows, np.int32)
    floats = np.zeros(rows, np.float32)
    return Decode(
        steps=8,
        source=integers,
        tokens=integers,
        positions=integers,
        remaining=integers,
        slots=integers,
        seeds=np.zeros((rows, 2), np.uint32),
        temperatures=floats,
        top_k=integers,
        top_p=floats,
        stop_tokens=np.zeros((rows, STOP_TOKENS), np.int32),
        pages=np.zeros(0, np.int32),
        page_counts=integers,
        page_places=integers,
    )


async def sample(bench, seq_id=0, session="alice"):
    """Ask the session's sampler 0, which draws from the base model."""
    await bench.catalog.add_sampler(session, 0, "tiny")
    return bench.submit(
        "sample", f"{session}:sample:0", seq_id, SampleRequest(ModelInput([ModelInputChunk(tokens=[1])]))
    )


def slots(command):
    """Which training slots have rows in a micro-batch."""
    return {
        int(slot) for slot, row in zip(command.rows.slots, command.rows.segments, strict=True) if row.any()
    }
