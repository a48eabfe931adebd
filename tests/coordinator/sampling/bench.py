"""A sample batch on a fake device, with the commands in flight between them."""

from collections import deque
from pathlib import Path

import numpy as np

from spmd_tx.coordinator.mesh.program_orders import ProgramOrders
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.sampling.bank import BASE_MODEL, VersionBank
from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.new_job import SamplingModel, draw_seeds
from spmd_tx.coordinator.sampling.shapes import SamplingLimits, SamplingShapes
from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.models.declared.rope import Rope
from spmd_tx.protocol.commands import AdapterSpec, Decode, Prefill
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import Reply
from tests.coordinator.sampling.fake_device import BASE, VOCABULARY, FakeDevice, continuation
from tests.support.model_shapes import TINY, resized
from tests.support.moves import is_one_of, refusal_of
from tests.support.ready_programs import EverythingReady

PAGE_SIZE = 4
MAX_CONTEXT = 64
COMPILED_WITHIN = 64  # commands
MODEL = resized(
    TINY,
    vocab_size=VOCABULARY,
    d_model=8,
    d_ff=8,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    head_dim=8,
    rope=Rope(1e4),
    max_positions=MAX_CONTEXT,
)


class Words:
    """Decodes token n to the text ``<n>``."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(f"<{id}>" for id in ids)


def ignore(sample):
    pass


class Bench:
    """Runs a batch on a fake device, with commands in flight between them."""

    def __init__(
        self,
        *,
        shards=1,
        rows=4,
        pages=40,
        decode_steps=8,
        prefill_tokens=256,
        slots=4,
        listener=ignore,
        model=MODEL,
        programs=None,
        on_demand=False,
        on_cpu=False,
        batch_invariant=False,
        exact=False,
        state_slots=0,
        speculates=False,
        expects=None,
        ridge=0.0,
    ):
        """``on_demand``: a program is compiled once a request waits for it, and nothing else can be sent."""
        limits = SamplingLimits(
            shapes=SamplingShapes(
                *(shards, MAX_CONTEXT, PAGE_SIZE, rows, prefill_tokens, on_cpu, batch_invariant, speculates),
                ridge=ridge,
                draft_cost=0.02 if expects else 0.0,
            ),
            pages_per_shard=pages,
            decode_steps=decode_steps,
            state_slots=state_slots,
        )
        self.bank = VersionBank(slots, Path("/paged-out"))
        self.compiles = on_demand
        self.orders = ProgramOrders(menu=()) if on_demand else programs or EverythingReady()
        self.batch = SampleBatch(
            SamplingModel(model, MAX_CONTEXT, Words(), batch_invariant=batch_invariant),
            self.bank,
            limits,
            self.orders,
            listener,
        )
        self.prefills = set(limits.shapes.prefills())
        self.decodes = {rows for rows, _ in limits.shapes.decodes(slots)}
        self.device = FakeDevice(shards, pages, PAGE_SIZE, exact, expects)
        self.shards = shards
        self.rows = rows
        self.refused = set()  # folders that are not loaded
        self.refuses_damage = False  # because they are damaged
        self.in_flight = deque()
        self.commands = []
        self.results = {}
        self.bodies = {}
        self.failures = {}

    def register(self, version):
        self.bank.register(version, AdapterSpec(rank=4), version)

    def admit(self, name, prompt, version=BASE_MODEL, **options):
        grammar, sampler = options.pop("grammar", None), options.pop("sampler", None)
        fields = {key: options.pop(key) for key in list(options) if key in SampleRequest.__struct_fields__}
        self.batch.admit(
            name,
            SampleRequest(
                ModelInput([ModelInputChunk(tokens=list(prompt))]),
                SamplingParams(**options),
                sampling_session_id=sampler,
                **fields,
            ),
            version,
            grammar,
        )

    def send(self):
        may_send = self.batch.may_send
        dispatch = self.batch.next_dispatch()
        while dispatch is None and self._compile():
            dispatch = self.batch.next_dispatch()
        if dispatch is None:
            return False
        assert may_send, "a scheduler would not have asked for this command"
        self._check_size(dispatch.command)
        refusal = refusal_of(dispatch.command, self.refused)
        arrays, metrics = self.device.execute(dispatch.command)
        reply = Reply(
            generation=1,
            process=0,
            sequence=len(self.commands),
            arrays=arrays,
            metrics=metrics,
            refusal=refusal,
            is_damage=self.refuses_damage,
        )
        self.commands.append(dispatch.command)
        self.in_flight.append((dispatch, reply))
        return True

    def _compile(self):
        """Have the programs compiled that requests wait for; return whether there were any."""
        wanted = self.batch.program_requests() if self.compiles else []
        self.orders.update_awaited(wanted)
        while (order := self.orders.next_order(only_awaited=True)) is not None:
            self.orders.settled(order, 1.0, None)
        return bool(wanted)

    def _check_size(self, command):
        """Check that every command has one of the expected shapes."""
        if isinstance(command, Prefill):
            table = 0 if command.tables is None else command.tables.shape[1]
            rows, length = command.rows.tokens.shape
            shape = command.block * self.shards or rows, command.piece or length, table
            assert shape in self.prefills
            assert self.orders.is_ready(program_of_prefill(command, *shape))
        elif isinstance(command, Decode):
            assert (command.block * self.shards or len(command.source)) in self.decodes

    def absorb(self):
        dispatch, reply = self.in_flight.popleft()
        for name, outcome in dispatch.absorb(reply):
            assert name not in self.results
            if isinstance(outcome, Failed):
                self.failures[name] = outcome
                continue
            self.bodies[name] = outcome.body
            self.results[name] = tinker_pb2.SampleResponse.FromString(outcome.body)

    def run(self, depth=3):
        """Run until nothing is left, with up to ``depth`` commands in flight.

        Programs that requests wait for come in the end, although others may go on without them.
        """
        while self.batch.waiting() or self.in_flight:
            while len(self.in_flight) < depth and self.send():
                if len(self.commands) % COMPILED_WITHIN == 0:
                    self._compile()
            assert self.in_flight, "nothing is on its way and nothing can be sent"
            self.absorb()
        return self.results

    def tokens(self, name):
        return [np.frombuffer(each.tokens, np.int32).tolist() for each in self.results[name].sequences]

    def logprobs(self, name):
        return [np.frombuffer(each.logprobs, np.float32).tolist() for each in self.results[name].sequences]

    def prompt_logprobs(self, name):
        return np.frombuffer(self.results[name].prompt_logprobs, np.float32).tolist()

    def hits(self, name):
        return self.results[name].prompt_cache_hit_tokens

    def sent(self, kind):
        return [command for command in self.commands if is_one_of(command, kind)]


def program_of_prefill(command, rows, length, table):
    wishes = command.wishes
    widths = {} if wishes is None else {"named": wishes.targets.shape[2], "draws": wishes.draws}
    top = 0 if wishes is None else wishes.top
    return ProgramShape(
        step="prefill",
        rows=rows,
        row_length=length,
        table=table,
        logprobs=command.logprobs,
        top=top,
        **widths,
    )


def free_slots(bench):
    return [shard._states.free for shard in bench.batch._shards]


def free_pages(bench):
    return [shard.pool.free for shard in bench.batch._shards]


def expected(name, prompt, count, *, index=0, seed=None, version=BASE, stop=()):
    return continuation(version, prompt, draw_seeds(seed, name, index), count, stop)


def prompt_of(length, offset=0):
    return [(offset + 7 * number) % VOCABULARY for number in range(length)]
