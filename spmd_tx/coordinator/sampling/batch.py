"""Continuous batching: tracks the samples on the device and makes the next command. No I/O, no clock.

Requests join and leave between commands. Up to two Decodes are in flight: a row's state stays on the device,
so the next Decode can be sent before the tokens of the last one are known, and rows that turn out to have
ended are dead in it. A sample whose end is certain leaves as soon as its last Decode is sent.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby

from spmd_tx.coordinator.grammar.compiler import CompiledGrammar
from spmd_tx.coordinator.images.seen import SeenImages
from spmd_tx.coordinator.mesh.program_orders import ProgramOrders, ProgramRequest
from spmd_tx.coordinator.requests.failures import failure
from spmd_tx.coordinator.requests.records import Failed, Outcome
from spmd_tx.coordinator.runtime.at_work import AtWork
from spmd_tx.coordinator.sampling.admission import Admission
from spmd_tx.coordinator.sampling.bank import VersionBank, VersionKey, not_loaded
from spmd_tx.coordinator.sampling.decode import decode_command, rows_of
from spmd_tx.coordinator.sampling.decode_choice import able_together, choose, least_steps, speculate
from spmd_tx.coordinator.sampling.dispatch import Dispatch, failed
from spmd_tx.coordinator.sampling.drawn import DrawnColumns, DrawnTokens
from spmd_tx.coordinator.sampling.guesses import Guesses
from spmd_tx.coordinator.sampling.job import Sample, SampleJob, job_scope
from spmd_tx.coordinator.sampling.new_job import SamplingModel, make_job
from spmd_tx.coordinator.sampling.programs import SamplingPrograms
from spmd_tx.coordinator.sampling.riders import reply_of_chunks, with_chunks
from spmd_tx.coordinator.sampling.shapes import SamplingLimits, decode_steps
from spmd_tx.coordinator.sampling.shard import Shard
from spmd_tx.coordinator.sampling.written import WrittenChunk, absorb
from spmd_tx.coordinator.wire.sampling import SampleRequest
from spmd_tx.protocol.commands import AnyCommand, Move
from spmd_tx.protocol.places import WeightsFolder
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import Reply

MOST_DECODES = 2  # sent and not yet answered
HURRIED_DECODES = 2  # after an idle time: requests that belong together arrive one after the other


@dataclass(eq=False)
class SampleBatch:
    """Holds all sample requests that are not answered yet."""

    model: SamplingModel
    bank: VersionBank
    limits: SamplingLimits
    programs: ProgramOrders
    listener: Callable[[Sample], None] = lambda sample: None  # is called with every sample that got tokens
    at_work: AtWork = field(default_factory=AtWork)
    _jobs: dict[str, SampleJob] = field(default_factory=dict)
    _aside: list[SampleJob] = field(default_factory=list)  # lonely ones that wait until another one has ended
    _ended: list[tuple[str, Outcome]] = field(default_factory=list)  # while a reply is taken in
    _arrivals: int = 0
    _planned: deque[Dispatch] = field(default_factory=deque)
    _decodes: int = 0  # sent so far; also the number of the last one
    _hurried: int = 0  # how many of the next Decodes have few steps

    def __post_init__(self) -> None:
        shapes, config, context = self.limits.shapes, self.model.config, self.model.max_context
        longest = (self.limits.pages_per_shard - 1) * shapes.page_size
        assert longest >= context, f"pages for {longest} tokens, context of {context}"
        self._pool, steps = self.model.images, self.limits.decode_steps
        self._sampling = SamplingPrograms(self.programs, shapes, self.bank.size, steps, config.vocab_size)
        self._guesses = Guesses(shapes)
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing on the device that could be used."""
        limits, config = self.limits, self.model.config
        has = {"has_routing": bool(config.n_experts), "has_rings": bool(config.window)}
        self._shards = [Shard(limits, **has) for _ in range(limits.shapes.shards)]
        self._pool.clear()
        of_devices = self.bank, self._shards, self._sampling, self._pool
        self._admission = Admission(*of_devices, has_states=bool(limits.state_slots))
        self._at_command: Callable[[], Iterable[SampleJob]] = tuple  # of the command that is being planned
        self._prefilled_last = False
        self._unanswered = 0  # Decodes
        self._most_unanswered = MOST_DECODES  # 1 if the last one speculates: nobody knows what it draws

    @property
    def planned_for(self) -> set[str]:
        """The requests that were being planned when ``next_dispatch`` raised: all, unless some stand out."""
        jobs = self._admission.at_work or self._at_command() or self._jobs.values()
        return {job.request_id for job in jobs if job not in self._aside}

    def start_over(self, lonely: Collection[str]) -> list[tuple[str, Outcome]]:
        """Go on after an error from a state that is known: without anything that is on the device.

        The known tokens stay. The ``lonely`` requests go on one after the other, in commands of their own.
        Replies to what has been sent must not be absorbed any more. Returns the requests that have finished.
        """
        moves = [each for each in self._planned if not each.requests]
        moves += self._moves()
        self._planned = deque(moves)  # the bank counts on them
        self.bank.pool.unpin_all()
        self._begin()
        for job in list(self._jobs.values()):
            job.is_lonely |= job.request_id in lonely
            job.restart(job.number)
            if not job.waiting:
                self._finish(job, self._result(job))
        self._aside = [job for job in self._jobs.values() if job.is_lonely][1:]
        for job in self._jobs.values():
            if job not in self._aside:
                self._admission.line.add(job)
        return self._take_ended()

    def admit(
        self,
        request_id: str,
        body: SampleRequest,
        version: VersionKey,
        grammar: CompiledGrammar | None = None,
        images: SeenImages | None = None,
    ) -> None:
        """Add a validated request, whose version the bank knows, with its grammar and its images."""
        self._arrivals += 1
        job = make_job(request_id, self._arrivals, body, version, self.model)
        if images is not None and job.images:
            job.look_at(images, self._pool)
        if grammar is not None:
            job.constrain(grammar, has_states=bool(self.limits.state_slots))
        self._take_in(job)

    def resume(self, job: SampleJob) -> None:
        """Continue a request of an earlier batch, whose workers are gone; the bank knows its version."""
        self._arrivals += 1
        job.restart(self._arrivals)
        self._take_in(job)

    def unanswered(self) -> dict[str, SampleJob]:
        """Return the unanswered requests, with the tokens known so far, for another batch to resume."""
        return dict(self._jobs)

    def cancel(self, request_id: str) -> None:
        """Drop a request: later commands do no work for it. Unknown ids are ignored."""
        if (job := self._jobs.get(request_id)) is not None:
            self._end(job)

    def may_withdraw(self, request_id: str) -> bool:
        """Whether a request has not begun: nothing was sent for it."""
        return (job := self._jobs.get(request_id)) is None or not job.has_started

    def withdraw(self, request_id: str) -> SampleJob | None:
        """Drop a request that has not begun, for another batch to resume; None: it has not come yet."""
        if (job := self._jobs.get(request_id)) is not None:
            self._end(job)
            job.is_over = False
        return job

    @property
    def rows(self) -> int:
        """How many samples a Decode draws for."""
        return self.limits.shapes.rows * self.limits.shapes.shards

    def cached_tokens(self, version: VersionKey, session: str, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt the prefix cache has."""
        if not self.bank.knows(version):
            return 0
        scope = job_scope(self.bank.weights(version), session)
        return max(shard.count_cached(scope, prompt) for shard in self._shards)

    def waiting(self) -> bool:
        """Return whether any request is unanswered."""
        return bool(self._jobs)

    def take_dropped(self) -> list[AnyCommand]:
        """Return the commands that make workers forget versions; to be sent before any other."""
        return self.bank.take_dropped()

    def status(self, request_id: str) -> str | None:
        """Say what a request waits for; None if it makes progress or is unknown."""
        job = self._jobs.get(request_id)
        return None if job is None else self._admission.reason(job)

    def program_requests(self) -> list[ProgramRequest]:
        """Return the programs that requests wait for."""
        return self._admission.missing.requests()

    def not_compiled(self, program: ProgramShape, error: str) -> list[tuple[str, Outcome]]:
        """Fail the requests that cannot do without a program; return their outcomes."""
        shapes = self.limits.shapes
        if program.step == "decode" and program.rows > shapes.shards and not shapes.batch_invariant:
            return []  # they can use programs with fewer rows
        for job in [job for job in self._jobs.values() if program in self._admission.missing.of(job)]:
            self._finish(job, Failed(error, "server"))
        return self._take_ended()

    @property
    def may_send(self) -> bool:
        """Whether there may be a command to send now, before the next reply."""
        return bool(self._planned) or self._admission.has_prompts or self._unanswered < self._most_unanswered

    def next_dispatch(self) -> Dispatch | None:
        """Return the next command, which must be sent before any other call; None: nothing to do now."""
        if not self._planned:
            self._plan()
        return self._planned.popleft() if self._planned else None

    def _plan(self) -> None:
        """Plan prompts first, but never two Prefills in a row while rows wait for their next tokens."""
        self._at_command = tuple
        is_turn_of_rows = self._prefilled_last and any(shard.has_rows for shard in self._shards)
        may_prefill = self._admission.has_prompts and not is_turn_of_rows
        if may_prefill:
            self._plan_prefill()
        if not self._planned and self._unanswered < self._most_unanswered:
            self._plan_decode()
            if not self._planned and may_prefill and self._admission.riding.any_wait:
                self._plan_prefill()  # they waited for a Decode that does not come now

    def _plan_prefill(self) -> None:
        admitted = self._admission.admit()
        self._planned.extend(self._moves())
        self._prefilled_last = bool(self._planned) or not admitted.plan.is_empty
        if admitted.plan.is_empty:
            return
        self._at_command = lambda: admitted.jobs
        program = self._sampling.prefill(admitted.plan.program)
        self._sampling.programs.note_use(admitted.plan.program)
        assert program is not None, "a Prefill was planned whose program is not ready"
        placed = self._pool.place(admitted.plan.images)
        command = admitted.plan.command(admitted.scored, program, self.model.config.vocab_size, placed.ids)
        requests = frozenset(job.request_id for job in admitted.jobs)
        absorb = partial(self._absorb_prefill, admitted.written(program))
        self._planned += [Dispatch(each, lambda _: [], requests) for each in placed.commands]
        self._planned.append(Dispatch(command, absorb, requests))

    def _moves(self) -> list[Dispatch]:
        """Return the commands that move versions into slots."""
        moves = self._admission.take_moves()
        return [Dispatch(command, partial(self._absorb_move, command)) for command in moves]

    def _absorb_move(self, command: AnyCommand, reply: Reply) -> list[tuple[str, Outcome]]:
        """Fail the samples of a version that workers refused to load; what they draw is of no version."""
        if reply.refusal is None or not isinstance(command, Move):
            return []
        assert isinstance(command.source, WeightsFolder), f"{command.name} was refused: {reply.refusal}"
        version, error = self.bank.refuse(command.source.path, reply), not_loaded(reply)
        for job in [job for job in self._jobs.values() if job.version == version]:
            self._finish(job, Failed(str(error), error.fault))
        return self._take_ended()

    def _plan_decode(self) -> None:
        self._admission.riding.decodes_read = False
        able = [shard.candidates(self._decodes) for shard in self._shards]
        candidates = able_together(able, self._sampling)
        if not any(candidates):
            return
        self._at_command = lambda: {sample.job for samples in candidates for sample in samples}
        guessed = speculate(candidates, self._sampling, self._guesses, is_known=not self._unanswered)
        if guessed is not None and self._unanswered:
            return  # what is drawn now decides what is likely to follow
        choice = guessed or choose(candidates, self._sampling)
        is_hurried = bool(self._hurried) or (self._prefilled_last and self._admission.has_open_rows)
        riders = self._admission.riders()
        beside = self._sampling.beside_chunks(choice.program, choice.chosen, [each.owner for each in riders])
        is_hurried = is_hurried or bool(beside and riders)
        steps = decode_steps(least_steps(candidates), self.limits.decode_steps, is_hurried)
        self._admission.missing.note_left_out({each.job: choice.left_out[each] for each in choice.left_out})
        choice.hand_out_guesses()
        in_shards = zip(self._shards, choice.chosen, strict=True)
        chosen = [self._with_pages(shard, samples, steps) for shard, samples in in_shards]
        if choice.program is None:
            return
        self._at_command = lambda: {each.job for each in chain(*chosen, riders)}
        if not any(chosen):  # all of them had to leave for lack of pages; others go on with those
            return self._plan_decode()
        self._admission.riding.decodes_read = beside is not None
        read = self._admission.read_beside(riders) if beside is not None else []
        program = beside if beside is not None and read else choice.program
        self._sampling.programs.note_use(program)
        shape = self._sampling.decode_shape(program, chosen)
        has_states, vocab_size = bool(self.limits.state_slots), self.model.config.vocab_size
        command = decode_command(chosen, steps, shape, self._decodes, vocab_size, has_states=has_states)
        command = with_chunks(command, [each.segment.chunk for each in read], self.limits.shapes)
        self._decodes, self._unanswered = self._decodes + 1, self._unanswered + 1
        self._hurried = max(0, self._hurried - 1)
        self._prefilled_last = False
        drawn = [
            self._send(sample, number * shape.rows, row, steps)
            for number, samples in enumerate(chosen)
            for row, sample in rows_of(samples)
        ]
        self._most_unanswered = MOST_DECODES if guessed is None else 1
        jobs = {each.sample.job for each in drawn} | {each.prefill.job for each in read}
        requests = frozenset(job.request_id for job in jobs)
        self._planned.append(Dispatch(command, partial(self._absorb_decode, drawn, read), requests))

    def _with_pages(self, shard: Shard, candidates: list[Sample], steps: int) -> list[Sample]:
        """Return the candidates that get pages for ``steps`` steps; preempt others, but never the oldest."""
        self._at_command = lambda: {sample.job for sample in candidates}
        for sample in () if shard.grow(candidates, steps) else candidates:  # mostly there are enough for all
            self._at_command = partial(list, [sample.job])
            while sample.is_resident and not shard.grow([sample], steps):
                if sample.guess is not None or shard.drop_a_prompt():
                    sample.guess = None  # nobody leaves for what may be of no use
                    continue
                victim = shard.victim()
                assert victim is not None, "the oldest sample does not fit into the cache"
                self._leave(victim)
                self._wait_again(victim)
        return shard.lend_slots([sample for sample in candidates if sample.is_resident])

    def _send(self, sample: Sample, first_row: int, row: int, steps: int) -> DrawnTokens:
        drawn = DrawnTokens.sent(sample, self._decodes, first_row, row, steps)
        if not sample.undecided and sample.guide is None:  # else it may have to draw again
            self._leave(sample)
        return drawn

    def _absorb_decode(
        self, drawn: list[DrawnTokens], read: list[WrittenChunk], reply: Reply
    ) -> list[tuple[str, Outcome]]:
        self._unanswered -= 1
        self._most_unanswered = MOST_DECODES
        of_chunks = reply_of_chunks(reply.arrays, len(self._shards))
        for job, outcome in absorb(read, of_chunks, self._shards, self.at_work):
            self._finish(job, outcome)
        columns = DrawnColumns(reply)
        for job, of_job in groupby(drawn, key=lambda each: each.sample.job):
            with self.at_work.on(job.request_id):
                for each in of_job:
                    self._absorb_drawn(each, columns)
        return self._take_ended()

    def _absorb_drawn(self, drawn: DrawnTokens, columns: DrawnColumns) -> None:
        sample, job = drawn.sample, drawn.sample.job
        try:
            if not drawn.take(columns):
                return
            self.listener(sample)
        except BaseException as error:  # the text of a stop string, perhaps
            return self._finish(job, failed(job.request_id, error))
        if sample.stop_reason is None:
            if sample.is_spoilt and sample.is_resident:
                self._leave(sample)
            return None if sample.is_resident else self._wait_again(sample)
        self._guesses.ended(sample)
        if sample.is_resident:
            self._leave(sample)
        else:
            self._shards[sample.shard].remember_what_is_left(sample)
        if all(other.stop_reason is not None for other in job.samples):
            self._finish(job, self._result(job))

    def _absorb_prefill(self, written: list[WrittenChunk], reply: Reply) -> list[tuple[str, Outcome]]:
        for job, outcome in absorb(written, reply.arrays, self._shards, self.at_work):
            self._finish(job, outcome)
        return self._take_ended()

    def _take_ended(self) -> list[tuple[str, Outcome]]:
        ended, self._ended = self._ended, []
        return ended

    def _result(self, job: SampleJob) -> Outcome:
        try:
            with self.at_work.on(job.request_id):
                return job.result()
        except BaseException as error:
            return failure(error, f"the result of sample request {job.request_id}")

    def _wait_again(self, sample: Sample) -> None:
        """Put a preempted sample back in line once all of its tokens are known."""
        if not sample.outstanding:
            self._shards[sample.shard].remember_state_left(sample)
            self._admission.put_back(sample)

    def _leave(self, sample: Sample) -> None:
        self._shards[sample.shard].leave(sample)
        self.bank.pool.unpin(sample.bank)

    def _take_in(self, job: SampleJob) -> None:
        self.bank.check(job.version)  # which may have changed while the request was read
        if not self._jobs:
            self._hurried = HURRIED_DECODES
        self._jobs[job.request_id] = job
        self.bank.hold(job.version)
        self._admission.line.add(job)

    def _finish(self, job: SampleJob, outcome: Outcome) -> None:
        self._end(job)
        self._ended.append((job.request_id, outcome))

    def _end(self, job: SampleJob) -> None:
        job.is_over = True
        self.bank.let_go(job.version)
        del self._jobs[job.request_id]
        self._admission.withdraw(job)
        if job in self._aside:
            self._aside.remove(job)
        elif job.is_lonely and self._aside:
            self._admission.line.add(self._aside.pop(0))
        for sample in job.samples:
            if sample.is_resident:
                self._leave(sample)
            self._shards[sample.shard].drop_state(sample)
