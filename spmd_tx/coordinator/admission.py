"""Which waiting samples start next, on which data shard, and the Prefill that this takes. No I/O, no clock.

Samplers take turns. Each may have an even share of a data shard's rows whatever the others hold (with more
residents than rows the shard lets them take turns), and what nobody claims goes to whoever waits. A request
that finds too few pages may be passed over a number of times; then nobody starts before it.
"""

from dataclasses import dataclass, field

from spmd_tx.coordinator.bank import UNPLACED, VersionBank
from spmd_tx.coordinator.prefill import PrefillPlan, Segment
from spmd_tx.coordinator.samples import Sample, SampleJob
from spmd_tx.coordinator.shard import Shard
from spmd_tx.coordinator.waiting import WaitingLine
from spmd_tx.protocol import AnyCommand

MOST_PASSED_OVER = 64  # starts of others

NO_ROW = "waiting for a free row; all rows of the decode batch are in use"
NO_PAGES = "waiting for room in the key-value cache"
NO_SLOT = "waiting for a sampler slot; all of them hold weights that are being sampled from"
NO_TURN = "waiting for its turn"


@dataclass
class Admitted:
    """Commands for the samples that start: first ``before``, then the plan's, unless that is empty."""

    plan: PrefillPlan
    before: list[AnyCommand] = field(default_factory=list)
    scored: list[tuple[SampleJob, Segment]] = field(
        default_factory=list
    )  # of which more is wanted than samples
    prompts: list[tuple[SampleJob, Segment]] = field(default_factory=list)  # that are written
    started: set[SampleJob] = field(default_factory=set)
    tokens: int = 0  # of prompts whose first samples start,
    found: int = 0  # and those of them that were found in the prefix cache
    short_of_pages: set[SampleJob] = field(default_factory=set)


class Admission:
    """The line of waiting samples, and the rules by which they start."""

    def __init__(self, bank: VersionBank, shards: list[Shard], page_size: int, prefill_tokens: int) -> None:
        self.line = WaitingLine()
        self._bank = bank
        self._shards = shards
        self._page_size = page_size
        self._prefill_tokens = prefill_tokens

    @property
    def has_open_rows(self) -> bool:
        """Whether someone waits although rows are free."""
        return bool(self.line) and any(len(shard.residents) < shard.rows for shard in self._shards)

    def put_back(self, sample: Sample) -> None:
        """A sample that had to leave waits again."""
        waiting = sample.job.waiting
        waiting.append(sample)
        waiting.sort(key=lambda each: each.index)
        self.line.add(sample.job)

    def withdraw(self, job: SampleJob) -> None:
        """Nothing of this job is to start any more."""
        job.waiting.clear()
        self.line.remove(job)
        self._forget_prompts(job)

    def admit(self) -> Admitted:
        """Make samples resident, as many as one Prefill takes."""
        admitted = Admitted(
            PrefillPlan(
                shards=len(self._shards),
                page_size=self._page_size,
                tokens=self._prefill_tokens,
                copies=self._shards[0].rows,
            )
        )
        self._bank.new_round()
        overdue = self._overdue()
        if overdue is None or self._start_part(overdue, None, admitted):
            for share in (self._share(), None):
                while self._go_round(share, admitted):
                    pass
        for job in admitted.short_of_pages - admitted.started:
            job.passed_over += len(admitted.started)
        # Not earlier: a page that this Prefill copies from must not be written to by the same Prefill.
        for job in admitted.started:
            if all(sample.tokens for sample in job.waiting):
                self._forget_prompts(job)
        return admitted

    def _overdue(self) -> SampleJob | None:
        """The job that nobody may start before; once it has started, nobody drives it out either."""
        first = (self.line.first(sampler) for sampler in self.line.samplers())
        job = next((job for job in first if job is not None and job.passed_over >= MOST_PASSED_OVER), None)
        if job is not None and not job.is_overdue:
            job.is_overdue = True
            for shard in self._shards:
                shard.sort_residents()
        return job

    def _share(self) -> int:
        """Rows of a data shard that each sampler may have whatever the others hold."""
        samplers = {sample.job.sampler for shard in self._shards for sample in shard.residents}
        return max(1, self._shards[0].rows // max(1, len(samplers | set(self.line.samplers()))))

    def _go_round(self, share: int | None, admitted: Admitted) -> bool:
        """Give each sampler a turn; False when none could start anything."""
        any_started = False
        for sampler in self.line.samplers():
            job = self.line.first(sampler)
            if job is not None and self._start_part(job, share, admitted):
                self.line.serve(sampler)
                any_started = True
        return any_started

    def _start_part(self, job: SampleJob, share: int | None, admitted: Admitted) -> bool:
        part = job.next_part()
        job.scope = f"{self._bank.weights(job.version)} {job.session}"
        number, count = self._best_shard(job, part, share, admitted)
        if not count:
            return False
        shard = self._shards[number]
        found = len(shard.cached(part)) * self._page_size
        unwritten = 0 if shard.kept_prompt(part) else part[0].position - found
        if not admitted.plan.fits(number, job.version, unwritten, found):
            job.obstacle = NO_TURN
            return False
        placement = self._bank.place(job.version)
        if placement.bank == UNPLACED:
            job.obstacle = NO_SLOT
            return False
        admitted.before += placement.before
        self._start(part[:count], number, placement.bank, admitted)
        self._update_line(job, is_cut=count < len(part))
        return True

    def _best_shard(
        self, job: SampleJob, part: list[Sample], share: int | None, admitted: Admitted
    ) -> tuple[int, int]:
        """The data shard that has room for most samples of the part, and for how many."""
        best, best_rank = (0, 0), (0, False, 0, 0)
        job.obstacle = NO_ROW
        for number, shard in enumerate(self._shards):
            mine = shard.count_of(job.sampler)
            rows = shard.rows - len(shard.residents) if share is None else share - mine
            rows = min(rows, len(part), admitted.plan.copies_left(number))
            if rows <= 0:
                continue
            count = min(rows, shard.room_for(part, is_newcomer=not mine))
            if not count:
                job.obstacle = NO_PAGES
                admitted.short_of_pages.add(job)
            is_kept = shard.kept_prompt(part) is not None
            rank = (count, is_kept, len(shard.cached(part)), -len(shard.residents))
            if rank > best_rank:
                best, best_rank = (number, count), rank
        return best

    def _start(self, part: list[Sample], number: int, bank: int, admitted: Admitted) -> None:
        job, content = part[0].job, part[0].content
        is_cut = len(part) < len(job.next_part())
        start = self._shards[number].start(part, keep_prompt=is_cut)
        for sample in part:
            sample.shard, sample.bank = number, bank
            self._bank.pin(bank)
        if job.cache_hits is None:
            job.cache_hits = start.found
            admitted.tokens += len(job.prompt)
            admitted.found += start.found
        if start.written < len(content) - 1:
            segment = admitted.plan.add(number, job.version, bank, content, start)
            admitted.prompts += [] if part[0].tokens else [(job, segment)]
            if job.needs_scores:
                admitted.scored.append((job, segment))
        elif job.needs_scores:
            job.scores = job.wishes.scores_of_one_token()
        job.needs_scores = False
        admitted.plan.copy(number, start.copies)
        admitted.started.add(job)

    def _update_line(self, job: SampleJob, is_cut: bool) -> None:
        job.waiting = [sample for sample in job.waiting if not sample.is_resident]
        job.has_started = True
        if not job.waiting:
            self.line.remove(job)
        elif is_cut and len(job.samples) > sum(shard.rows for shard in self._shards):
            self.line.step_back(job)  # it would keep its sampler's other requests waiting for very long

    def _forget_prompts(self, job: SampleJob) -> None:
        for shard in self._shards:
            shard.forget_prompt(job)
