"""One data shard: its resident samples, their pages and the prefix cache, and preemption. Pure."""

from collections import Counter
from dataclasses import dataclass

from spmd_tx.coordinator.sampling.job import NEVER, Sample, SampleJob
from spmd_tx.coordinator.sampling.pages import BlockKeys, PrefixCache, pages_for


@dataclass(frozen=True)
class Start:
    """Says what a Prefill must do for samples that become resident."""

    pages: list[int]  # of the common content, without its last token
    written: int  # how many of its first tokens the pages hold already
    found: int  # those of them that were found in the prefix cache
    # (from, to): a partly filled last page is copied for each sample that does not own it
    copies: dict[Sample, tuple[int, int]]


class Shard:
    """Holds resident samples and their pages. At most ``rows`` samples take part in one Decode."""

    def __init__(
        self,
        *,
        rows: int,
        page_size: int,
        pages: int,
        decode_steps: int,
        has_cache: bool = True,
        piece: int = 0,
    ) -> None:
        """With ``piece`` only whole pieces of so many tokens, read by Prefills, are found in the cache."""
        self.rows = rows
        self._cache = PrefixCache(pages)
        self.pool = self._cache.pool
        self._has_cache = has_cache
        self.residents: list[Sample] = []  # oldest first
        self._page_size = page_size
        self._pages_found = piece // page_size or 1  # and multiples of it
        self._keeps_drawn = not piece  # whether pages that Decodes have written may be found
        self._growth = pages_for(decode_steps, page_size)  # pages that one Decode may add to a sample
        self._prompts: dict[
            SampleJob, list[int]
        ] = {}  # prompt pages, kept for samples that have yet to start

    def count_of(self, sampler: str) -> int:
        """Return how many samples of a sampler are resident."""
        return sum(sample.job.sampler == sampler for sample in self.residents)

    def room_for(self, part: list[Sample], is_newcomer: bool) -> int:
        """Return how many samples of a part the free pages allow.

        Pages that the residents may need for the next Decode are reserved for them, except from the first
        sample of a newcomer. On an empty shard there is room for at least one.
        """
        room = self._fitting(part, is_newcomer)
        if room or self.residents:
            return room
        self._forget_prompts_but(part[0].job)
        room = self._fitting(part, is_newcomer)
        if not room:
            # Its own prompt, too: a sample beside it takes a page more than one that owns it.
            self._forget_prompts_but(None)
        return room or 1

    def start(self, part: list[Sample], keep_prompt: bool) -> Start:
        """Make samples with common content resident; ``keep_prompt`` if more of the job's will start."""
        job, written = part[0].job, part[0].next_position
        full, partial = divmod(written, self._page_size)
        kept, found = self.kept_prompt(part), self.cached(part)
        if kept is None:
            self.pool.hold(found)
            pages = found + self.pool.take(pages_for(written, self._page_size) - len(found))
        else:
            pages = kept
        copies = {}
        for number, sample in enumerate(part):
            if number == 0 and kept is None:
                sample.pages = list(pages)
            else:
                sample.pages = pages[:full]
                self.pool.hold(sample.pages)
                if partial:
                    sample.pages += self.pool.take(1)
                    copies[sample] = pages[full], sample.pages[full]
            sample.is_resident, sample.decode = True, NEVER
            self.residents.append(sample)
        self.sort_residents()
        if keep_prompt and kept is None and part[0].is_at_prompt:
            self.pool.hold(pages)
            self._prompts[job] = list(pages)
        known = len(found) * self._page_size
        return Start(list(pages), known if kept is None else written, 0 if kept else known, copies)

    def cached(self, part: list[Sample]) -> list[int]:
        """Return the usable pages of the prefix cache that hold the beginning of the common content."""
        first = part[0]
        if not self._has_cache or self.kept_prompt(part) is not None:
            return []
        most = first.next_position
        if first.job.wants_scores(most):
            most = first.job.scoring.first_scored
        found = self._cache.find(self._keys(first).first(most // self._page_size, first.content))
        return found[: len(found) - len(found) % self._pages_found]

    def _keys(self, sample: Sample) -> BlockKeys:
        if sample.keys is None or sample.keys.scope != sample.job.scope:
            sample.keys = BlockKeys(sample.job.scope, self._page_size)
        return sample.keys

    def _remember(self, sample: Sample, pages: list[int], count: int) -> None:
        """Let the first ``count`` pages, which are full, be found in the prefix cache."""
        if self._has_cache and count:
            self._cache.remember(self._keys(sample).first(count, sample.content), pages[:count])

    def remember_read(self, sample: Sample, pages: list[int], end: int) -> None:
        """Cache the pages of a content that planned commands write up to ``end``."""
        self._remember(sample, pages, end // self._page_size)

    @property
    def has_rows(self) -> bool:
        """Whether any sample is ready for Decodes."""
        return any(sample.prefill is None for sample in self.residents)

    def sort_residents(self) -> None:
        self.residents.sort(key=lambda sample: sample.age)

    def leave(self, sample: Sample) -> None:
        """Give a sample's pages back; no later command may use them for it."""
        self.residents.remove(sample)
        if sample.prefill is None:
            # Commands in flight write behind this position only.
            if self._keeps_drawn:
                self._remember(sample, sample.pages, sample.position // self._page_size)
        else:
            sample.prefill.give_up(sample)
            if sample.prefill.is_given_up:
                self.forget_prompt(sample.job)
            sample.prefill = None
        if sample.outstanding and self._keeps_drawn:
            sample.left = [(page, self.pool.takes(page)) for page in sample.pages]
        self.pool.release(sample.pages)
        sample.pages, sample.is_resident = [], False

    def remember_what_is_left(self, sample: Sample) -> None:
        """Cache the pages that a sample gave back, now that all of its tokens are known."""
        count = sample.position // self._page_size
        if self._has_cache and sample.left and count:
            self._cache.recall(self._keys(sample).first(count, sample.content), sample.left[:count])
        sample.left = []

    def forget_prompt(self, job: SampleJob) -> None:
        self.pool.release(self._prompts.pop(job, []))

    def candidates(self, last_decode: int) -> list[Sample]:
        """Return the samples for the rows of the next Decode, oldest first.

        A sample can take part if its state is on the device, because it was in the last Decode, or known,
        because no token of it is outstanding. When there are more than rows, samplers share them evenly.
        """
        able = [
            each
            for each in self.residents
            if each.prefill is None and (each.decode == last_decode or not each.outstanding)
        ]
        if len(able) <= self.rows:
            return able
        seen: Counter[str] = Counter()
        ranks = {}
        for sample in able:
            ranks[sample] = seen[sample.job.sampler]
            seen[sample.job.sampler] += 1
        chosen = sorted(able, key=lambda sample: (ranks[sample], sample.age))[: self.rows]
        return sorted(chosen, key=lambda sample: sample.age)

    def grow(self, sample: Sample, steps: int) -> bool:
        """Give a sample the pages that a Decode of ``steps`` steps may write; False if too few are free."""
        missing = pages_for(sample.last_position(steps) + 1, self._page_size) - len(sample.pages)
        if missing > self.pool.free:
            return False
        sample.pages += self.pool.take(max(0, missing))
        return True

    def drop_a_prompt(self) -> bool:
        """Give up the youngest kept prompt with pages that no sample holds; False if there is none.

        Its pages are free once no other kept prompt, of the same tokens, holds them.
        """
        kept = Counter(page for pages in self._prompts.values() for page in pages)
        for job in sorted(self._prompts, key=lambda job: job.number, reverse=True):
            if any(self.pool.holders(page) == kept[page] for page in self._prompts[job]):
                self.forget_prompt(job)
                return True
        return False

    def victim(self) -> Sample | None:
        """Return the sample to preempt: the youngest of the sampler with the most; None: only one is left.

        The oldest sample of all is never preempted, so there is always progress.
        """
        others = self.residents[:0:-1]  # youngest first
        counts = Counter(sample.job.sampler for sample in others)
        return max(others, key=lambda sample: counts[sample.job.sampler], default=None)

    def _fitting(self, part: list[Sample], is_newcomer: bool) -> int:
        written = part[0].next_position
        partial = 1 if written % self._page_size else 0
        common = 0
        if self.kept_prompt(part) is None:
            common = written // self._page_size - sum(map(self.pool.is_held, self.cached(part)))
        left = self.pool.free - common
        fitting = max(0, left - self._growth * len(self.residents)) // (partial + self._growth)
        if not fitting and left >= partial and (is_newcomer or not self.residents):
            return 1
        return min(fitting, len(part))

    def kept_prompt(self, part: list[Sample]) -> list[int] | None:
        """Return the kept pages that hold the common content of these samples."""
        return self._prompts.get(part[0].job) if part[0].is_at_prompt else None

    def _forget_prompts_but(self, job: SampleJob | None) -> None:
        for other in [each for each in self._prompts if each is not job]:
            self.forget_prompt(other)
