"""Admission: chooses the samples that start next, their data shard, and plans the Prefill. No I/O, no clock.

Samplers take turns. Each may have an even share of a data shard's rows whatever the others hold (a shard with
more residents than rows lets them take turns), and rows that nobody claims go to whoever waits. A request
that finds too few pages may be passed over a number of times; then nobody starts before it.

A request whose programs are not ready waits for them without blocking others: a few of the requests behind
it in its sampler's line may start before it.

Long prompts are prefilled in chunks. They take turns with later requests and delay them by one chunk at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.sampling.bank import UNPLACED, VersionBank
from spmd_tx.coordinator.sampling.job import ChunkedPrefill, Sample, SampleJob, job_scope
from spmd_tx.coordinator.sampling.missing_programs import MissingPrograms
from spmd_tx.coordinator.sampling.prefill import PrefillChunk, PrefillPlan, PromptSegment, plain_scores
from spmd_tx.coordinator.sampling.programs import SamplingPrograms
from spmd_tx.coordinator.sampling.request.prompt_scores import PromptScoring, Scores
from spmd_tx.coordinator.sampling.riders import Riding
from spmd_tx.coordinator.sampling.shard import Shard
from spmd_tx.coordinator.sampling.waiting_line import WaitingLine
from spmd_tx.coordinator.sampling.written import WrittenChunk
from spmd_tx.protocol.commands import AnyCommand
from spmd_tx.protocol.programs import ProgramShape

MOST_PASSED_OVER = 64  # starts of others before a request blocks them
MOST_LOOKED_AT = 16  # jobs at the head of a sampler's line that may start before one without a program

NO_ROW = "waiting for a free row; all rows of the decode batch are in use"
NO_PAGES = "waiting for room in the key-value cache"
NO_SLOT = "waiting for a sampler slot; all of them hold weights that are being sampled from"
NO_TURN = "waiting for its turn"
NOT_READ = "waiting for its prompt, which is being read"


@dataclass
class Admitted:
    """Holds the plan for the samples that start."""

    plan: PrefillPlan
    # The flag: whether the request wants scores of the segment besides keys and values
    chunks: list[tuple[ChunkedPrefill, PromptSegment, bool]] = field(default_factory=list)
    started: set[SampleJob] = field(default_factory=set)
    tokens: int = 0  # prompt tokens of jobs whose first samples start
    cached: int = 0  # those of them that were found in the prefix cache
    short_of_pages: set[SampleJob] = field(default_factory=set)

    @property
    def jobs(self) -> set[SampleJob]:
        """Those for which the Prefill works."""
        return self.started | {prefill.job for prefill, _, _ in self.chunks}

    def written(self, program: ProgramShape) -> list[WrittenChunk]:
        """Return the chunks in the reply of the Prefill, which runs a program."""
        row_of = self.plan.row_of
        return [
            WrittenChunk(each, segment, row_of(segment, program), *way) for each, segment, *way in self.chunks
        ]

    @property
    def scored(self) -> list[tuple[PromptScoring, PromptSegment]]:
        """The segments of which scores are wanted, each with which."""
        return [(prefill.job.scoring, segment) for prefill, segment, is_scored in self.chunks if is_scored]


@dataclass(eq=False)
class Admission:
    """Holds the line of waiting samples and decides which of them start."""

    bank: VersionBank
    shards: list[Shard]
    sampling: SamplingPrograms
    pool: ImagePool
    has_states: bool = False  # whether the model keeps a state of each sequence
    at_work: Sequence[SampleJob] = ()  # the one that ``admit`` is planning; empty: none stands out
    line: WaitingLine = field(default_factory=WaitingLine)
    _moves: list[AnyCommand] = field(default_factory=list)  # of versions into slots, and not taken yet
    _prefills: list[ChunkedPrefill] = field(
        default_factory=list
    )  # not planned to their end; the next one first
    _is_turn_of_prefills: bool = False  # they go before newcomers

    def __post_init__(self) -> None:
        self.missing = MissingPrograms(self.sampling.programs)
        self._shapes = self.sampling.shapes
        self.riding = Riding(self._shapes, self.shards)

    @property
    def has_open_rows(self) -> bool:
        """Whether a sample waits although rows are free, or waits for chunks of its prompt."""
        if any(not prefill.is_given_up for prefill in self._prefills):
            return True
        return bool(self.line) and any(len(shard.residents) < shard.rows for shard in self.shards)

    @property
    def has_prompts(self) -> bool:
        """Whether a sample waits to start, or for chunks of its prompt."""
        return bool(self.line or self._prefills)

    def put_back(self, sample: Sample) -> None:
        """Let a preempted sample wait again."""
        waiting = sample.job.waiting
        sample.start_over()
        waiting.append(sample)
        waiting.sort(key=lambda each: each.index)
        self.line.add(sample.job)

    def reason(self, job: SampleJob) -> str | None:
        """Say what a request waits for; None if it makes progress."""
        if (program := self.missing.reason(job)) is not None or job.has_started:
            return program
        ahead = self.line.ahead_of(job)
        return f"{ahead:,} sample{'s' * (ahead > 1)} ahead; {job.obstacle}" if ahead else job.obstacle

    def withdraw(self, job: SampleJob) -> None:
        """Start no more samples of this job."""
        job.waiting.clear()
        self.missing.forget(job)
        self.line.remove(job)
        self._forget_prompts(job)

    def take_moves(self) -> list[AnyCommand]:
        """Return the commands that move versions into slots; to be sent before any other."""
        moves, self._moves = self._moves, []
        return moves

    def admit(self) -> Admitted:
        """Make samples resident and plan their prompts, as much as one Prefill takes."""
        admitted, self.riding.any_wait = Admitted(self._new_plan()), False
        self._prefills = [prefill for prefill in self._prefills if not prefill.is_given_up]
        waiting = self._prefills
        if self._is_turn_of_prefills:
            self._continue_prefills(waiting, admitted)
        self._admit_newcomers(admitted)
        if not self._is_turn_of_prefills:
            self._continue_prefills(waiting, admitted)
        planned = {prefill for prefill, _, _ in admitted.chunks}
        self._is_turn_of_prefills = planned.isdisjoint(waiting)
        # Those without a chunk in this Prefill come first in the next one.
        self._prefills.sort(key=planned.__contains__)
        self._prefills = [prefill for prefill in self._prefills if not prefill.is_planned]
        for shard in self.shards:
            shard.planned()
        metrics.PROMPT_TOKENS.labels(metrics.group()).inc(admitted.tokens)
        metrics.CACHED_PROMPT_TOKENS.labels(metrics.group()).inc(admitted.cached)
        return admitted

    def _admit_newcomers(self, admitted: Admitted) -> None:
        self.bank.pool.new_round()
        overdue = self._overdue()
        if overdue is None or self._attempt(overdue, None, admitted) or overdue in self.missing:
            for share in (self._share(), None):
                while self._go_round(share, admitted):
                    pass
        for job in admitted.short_of_pages - admitted.started:
            job.passed_over += len(admitted.started)
        # Not earlier: this Prefill must not write to a page that it copies from.
        for job in admitted.started:
            if not any(sample.is_at_prompt for sample in job.waiting):
                self._forget_prompts(job)

    def _continue_prefills(self, prefills: list[ChunkedPrefill], admitted: Admitted) -> None:
        """Plan the next chunks of prompts as far as there is room, one per prompt and Prefill."""
        for prefill in prefills:
            self.at_work = [prefill.job]
            copies_left, chunk = admitted.plan.copies_left(prefill.owner.shard), self._next_chunk(prefill)
            has_no_room = prefill.copies_needed > copies_left or not admitted.plan.fits(chunk)
            if self.riding.waits_for_decode(prefill, chunk) or has_no_room:
                continue
            self.missing.note(prefill.job, self._missing_for(prefill.job, chunk))
            if prefill.job not in self.missing and self._may_join(prefill.job, chunk, admitted):
                self._plan_chunk(prefill, admitted)
        self.at_work = ()

    def _plan_chunk(self, prefill: ChunkedPrefill, admitted: Admitted) -> None:
        """Plan a chunk; with the last one the samples are ready for Decodes."""
        chunk, job = self._next_chunk(prefill), prefill.job
        is_scored = job.wants_scores(chunk.end)
        segment = admitted.plan.add(chunk, self._scores(job, chunk))
        admitted.chunks.append((prefill, segment, is_scored))
        prefill.first = chunk.end
        if not (self._shapes.batch_invariant and is_scored and not job.scoring.needs_only_logprobs):
            self.shards[chunk.shard].remember_read(prefill.owner, prefill.pages, chunk.end)
        self._plan_copies(prefill, admitted)
        if prefill.is_planned:
            job.needs_scores = False

    def riders(self) -> list[ChunkedPrefill]:
        """Return the prompts of which a Decode may read a chunk, at most one of each data shard."""
        first = dict[int, ChunkedPrefill]()
        for prefill in self._prefills:
            if not prefill.is_given_up and self.riding.may_ride(prefill, self._next_chunk(prefill)):
                first.setdefault(prefill.owner.shard, prefill)
        return list(first.values())

    def read_beside(self, riders: Sequence[ChunkedPrefill]) -> list[WrittenChunk]:
        """Plan the next chunks of riders, which a Decode reads; none of those that had to leave."""
        read = [each for each in riders if not each.is_given_up]
        written = [WrittenChunk.beside(prefill, self._next_chunk(prefill)) for prefill in read]
        for each in written:
            each.prefill.first = each.segment.chunk.end
            self.shards[each.row].remember_read(each.prefill.owner, each.prefill.pages, each.prefill.first)
        self._prefills.sort(key=read.__contains__)  # the others have their turns first
        metrics.PROMPT_TOKENS_BESIDE.labels(metrics.group()).inc(sum(each.segment.length for each in written))
        return written

    def _plan_copies(self, prefill: ChunkedPrefill, admitted: Admitted) -> None:
        """Plan the copies of what planned chunks leave; at their end the samples are ready."""
        number, states = prefill.owner.shard, admitted.plan.states
        if states is not None:
            has_room = admitted.plan.copies_left(number) > 0
            states.copy_last(number, self.shards[number].state_copies(prefill, has_room=has_room))
        if prefill.is_planned:
            admitted.plan.copy(number, list(prefill.copies.values()))
            for sample in prefill.part:
                sample.prefill = None

    def _next_chunk(self, prefill: ChunkedPrefill) -> PrefillChunk:
        return prefill.next_chunk(self._end_of_chunk(prefill.job, prefill.first, prefill.end))

    def _end_of_chunk(self, job: SampleJob, first: int, end: int) -> int:
        """Return where the chunk from ``first`` on ends; of pieces, all are scored or none is."""
        if self._shapes.piece and job.wants_scores(end):
            scored = job.scoring.first_scored // self._shapes.piece * self._shapes.piece
            end = scored if first < scored else end
        return self._shapes.end_of_chunk(first, end)

    def _overdue(self) -> SampleJob | None:
        """Return the job that nobody may start before; once it runs, nobody preempts it either."""
        first = (job for sampler in self.line.samplers() for job in self.line.jobs(sampler, most=1))
        job = next((job for job in first if job.passed_over >= MOST_PASSED_OVER), None)
        if job is not None and not job.is_overdue:
            job.is_overdue = True
            for shard in self.shards:
                shard.sort_residents()
        return job

    def _share(self) -> int:
        """Return how many rows of a data shard each sampler may have whatever the others hold."""
        samplers = {sample.job.sampler for shard in self.shards for sample in shard.residents}
        return max(1, self.shards[0].rows // max(1, len(samplers | set(self.line.samplers()))))

    def _go_round(self, share: int | None, admitted: Admitted) -> bool:
        """Give each sampler a turn; return False when none could start anything."""
        any_started = False
        for sampler in self.line.samplers():
            for job in self.line.jobs(sampler, MOST_LOOKED_AT):
                has_started = self._attempt(job, share, admitted)
                if has_started:
                    self.line.serve(sampler)
                    any_started = True
                if has_started or job not in self.missing:
                    break
        return any_started

    def _attempt(self, job: SampleJob, share: int | None, admitted: Admitted) -> bool:
        """Start samples of a job if possible; return whether any were."""
        self.at_work = [job]
        has_started = self._start_part(job, share, admitted)
        self.at_work = ()
        return has_started

    def _start_part(self, job: SampleJob, share: int | None, admitted: Admitted) -> bool:
        part = job.next_part()
        job.scope = job_scope(self.bank.weights(job.version), job.session)
        if any(prefill.job is job and not prefill.is_given_up for prefill in self._prefills):
            job.obstacle = NOT_READ  # other samples cannot use its pages yet
            return False
        number, count = self._best_shard(job, part, share, admitted)
        if not count:
            return False
        chunk = self._first_chunk(job, part, number)
        decode = self.sampling.first_decode(part)
        missing = [*self._missing_for(job, chunk), *([] if decode is None else [decode])]
        is_ready = self.sampling.programs.is_ready
        missing += [each for each in self.bank.programs_to_place(job.version) if not is_ready(each)]
        self.missing.note(job, missing)
        if missing:
            return False
        if not (admitted.plan.fits(chunk) and self._may_join(job, chunk, admitted)):
            job.obstacle = NO_TURN
            return False
        placement = self.bank.place(job.version)
        if placement.bank == UNPLACED:
            job.obstacle = NO_SLOT
            return False
        self._moves += placement.before
        self._start(part[:count], number, placement.bank, admitted)
        self._update_line(job, is_cut=count < len(part))
        return True

    def _missing_for(self, job: SampleJob, chunk: PrefillChunk) -> list[ProgramShape]:
        """Return the programs that are missing to prefill a chunk alone."""
        alone = self._new_plan().program_with(chunk, self._scores(job, chunk))
        missing = [] if self.sampling.prefill(alone) is not None else [alone]
        is_ready = self.sampling.programs.is_ready
        return missing + [image.program for image in chunk.images if not is_ready(image.program)]

    def _may_join(self, job: SampleJob, chunk: PrefillChunk, admitted: Admitted) -> bool:
        """Return whether there is a program for the plan together with this chunk."""
        others = admitted.jobs - {job}
        if others and any(each.is_lonely for each in (job, *others)):
            return False
        scores = self._scores(job, chunk)
        if self._shapes.batch_invariant and chunk.length and admitted.plan.scores not in (None, scores):
            return False
        needed = admitted.plan.program_with(chunk, scores)
        program = self.sampling.prefill(needed)
        if program != needed:
            self.sampling.programs.prefer(needed)
        return program is not None

    def _scores(self, job: SampleJob, chunk: PrefillChunk) -> Scores:
        if chunk.length and job.wants_scores(chunk.end):
            return self.sampling.scores(job.scoring)
        return plain_scores(self._shapes)

    def _new_plan(self) -> PrefillPlan:
        copies = self._shapes.decode_rows
        return PrefillPlan(self._shapes, self.pool, copies=copies, has_states=self.has_states)

    def _first_chunk(self, job: SampleJob, part: list[Sample], number: int) -> PrefillChunk:
        """Return the first chunk of a part that starts on this data shard."""
        shard, end = self.shards[number], part[0].next_position
        first = end if shard.keeps_prompt(part) else shard.cached(part).length
        end = self._end_of_chunk(job, first, end)
        return PrefillChunk(number, job.version, 0, [], [], first, end, sight=job.sight)

    def _best_shard(
        self, job: SampleJob, part: list[Sample], share: int | None, admitted: Admitted
    ) -> tuple[int, int]:
        """Return the data shard with room for most samples of the part, and their number."""
        best, best_rank = (0, 0), (0, False, 0, 0)
        job.obstacle = NO_ROW
        for number, shard in enumerate(self.shards):
            held = shard.count_of(job.sampler)
            rows = shard.rows - len(shard.residents) if share is None else share - held
            rows = min(rows, len(part), admitted.plan.copies_left(number))
            if rows <= 0:
                continue
            count = min(rows, shard.room_for(part, is_newcomer=not held))
            if not count:
                job.obstacle = NO_PAGES
                admitted.short_of_pages.add(job)
            is_kept = shard.keeps_prompt(part)
            rank = (count, is_kept, shard.cached(part).length, -len(shard.residents))
            if rank > best_rank:
                best, best_rank = (number, count), rank
        return best

    def _start(self, part: list[Sample], number: int, bank: int, admitted: Admitted) -> None:
        job = part[0].job
        is_cut = len(part) < len(job.next_part())
        start = self.shards[number].start(part, keep_prompt=is_cut)
        for sample in part:
            sample.shard, sample.bank = number, bank
            self.bank.pool.pin(bank)
        if job.cache_hits is None:
            job.cache_hits = start.cached
            admitted.tokens += len(job.prompt)
            admitted.cached += start.cached
        admitted.started.add(job)
        content = part[0].content[: part[0].next_position + 1]
        prefill = ChunkedPrefill(part, content, start.pages, start.written, start.copies)
        prefill.take_cached(start.experts)
        for sample in part:
            sample.prefill = prefill
        if admitted.plan.states is not None:
            admitted.plan.states.copy_first(number, start.first_pages, start.first_states)
            admitted.plan.states.copy_last(number, start.kept_states)
        if not prefill.is_planned:
            if not self.riding.waits_for_decode(prefill, self._next_chunk(prefill)):
                self._plan_chunk(prefill, admitted)
            self._prefills += [] if prefill.is_planned else [prefill]
            return
        self._plan_copies(prefill, admitted)
        if job.needs_scores:
            job.scores = job.scoring.scores_of_one_token()
        job.needs_scores = False

    def _update_line(self, job: SampleJob, is_cut: bool) -> None:
        job.waiting = [sample for sample in job.waiting if not sample.is_resident]
        job.has_started = True
        if not job.waiting:
            self.line.remove(job)
        elif is_cut and len(job.samples) > sum(shard.rows for shard in self.shards):
            self.line.step_back(job)  # its sampler's other requests would wait for very long

    def _forget_prompts(self, job: SampleJob) -> None:
        for shard in self.shards:
            shard.forget_prompt(job)
