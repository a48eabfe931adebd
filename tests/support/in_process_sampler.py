"""Samples with an engine in this process, as a server does with workers."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from spmd_tx.coordinator.sampling.bank import VersionBank
from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.new_job import SamplingModel
from spmd_tx.coordinator.sampling.shapes import SamplingLimits, SamplingShapes
from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.reports import Reply
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.state import zeros
from tests.support import moves
from tests.support.ready_programs import EverythingReady


class Sampler:
    """Samples from training slots of an engine, each saved as a version."""

    def __init__(
        self,
        engine: Engine,
        adapter: AdapterSpec,
        versions: tuple[int, ...],
        *,
        pages: int = 0,
        **shapes: Any,
    ) -> None:
        """The bank gets the versions in this order, and the pages hold nothing. 0 ``pages``: all there are.

        ``shapes`` are further fields of SamplingShapes.
        """
        self.engine, setup = engine, engine.setup
        engine.state.cache = zeros(engine.mesh, engine.declared.cache)
        shards = setup.fsdp * setup.ep
        its_shapes = SamplingShapes(
            shards,
            setup.max_context,
            setup.page_size,
            engine.plan.decode_rows,
            on_cpu=engine.plan.on_cpu,
            batch_invariant=setup.batch_invariant,
            has_states=bool(engine.plan.state_slots),
            **shapes,
        )
        slots = engine.plan.state_slots
        limits = SamplingLimits(its_shapes, pages or engine.plan.pages, setup.decode_steps, slots)
        exact = setup.batch_invariant
        model = SamplingModel(engine.model, setup.max_context, None, batch_invariant=exact)
        self.bank = VersionBank(setup.bank_slots, Path("/nowhere"))
        self.batch = SampleBatch(model, self.bank, limits, EverythingReady())
        for slot in versions:
            bank = self.bank.reserve(f"version {slot}", adapter).bank
            engine.execute(moves.save_sampler(slot, bank, adapter))
        self.commands: list[Any] = []
        self.in_flight: deque[Any] = deque()
        self.results: dict[str, Any] = {}

    def ask(self, name, prompt, tokens, version: int | None = 0, **options):
        fields = {key: options.pop(key) for key in list(options) if key in SampleRequest.__struct_fields__}
        params = SamplingParams(max_tokens=tokens, **{"stop": [], **options})
        body = SampleRequest(ModelInput([ModelInputChunk(tokens=prompt)]), params, **fields)
        self.batch.admit(name, body, "base" if version is None else f"version {version}")

    def turn(self):
        """Send what can be sent, then read a reply."""
        while len(self.in_flight) < 3 and (dispatch := self.batch.next_dispatch()) is not None:
            arrays, _ = self.engine.execute(dispatch.command)
            self.commands.append(dispatch.command)
            self.in_flight.append((dispatch, arrays))
        dispatch, arrays = self.in_flight.popleft()
        fetched = {name: np.asarray(array) for name, array in arrays.items()}
        for name, outcome in dispatch.absorb(Reply(generation=0, process=0, sequence=0, arrays=fetched)):
            self.results[name] = tinker_pb2.SampleResponse.FromString(outcome.body)

    def run(self):
        while self.batch.waiting() or self.in_flight:
            self.turn()

    def answer(self, name):
        """The result's bytes, without the number of tokens that were cached."""
        result = self.results[name]
        result.ClearField("prompt_cache_hit_tokens")
        return result.SerializeToString()
