"""One data shard: its resident samples, their pages and the prefix cache, and preemption. Pure."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from spmd_tx.coordinator.sampling.cache.pages import BlockKeys, PrefixCache, pages_for
from spmd_tx.coordinator.sampling.cache.routing_pages import RoutingPages
from spmd_tx.coordinator.sampling.cache.state_moves import Copy
from spmd_tx.coordinator.sampling.cache.state_slots import (
    NO_HIT,
    NOTHING,
    Hit,
    Prefix,
    StateCache,
    ends_on_device,
    is_due,
    prefix_of,
)
from spmd_tx.coordinator.sampling.job import NEVER, ChunkedPrefill, Sample, SampleJob
from spmd_tx.coordinator.sampling.shapes import SamplingLimits
from spmd_tx.coordinator.sampling.start import KeptPrompt, Start


class Shard:
    """Holds resident samples and their pages. At most ``rows`` samples take part in one Decode."""

    def __init__(self, limits: SamplingLimits, *, has_routing: bool = False, has_rings: bool = False) -> None:
        """With ``has_routing`` pages are found in the cache once the experts of their tokens are known.

        Where Prefills read whole pieces, only what they have read is found. ``has_rings``: states are rings.
        """
        shapes = limits.shapes
        self.rows = shapes.rows
        self._states = StateCache(limits.state_slots) if limits.state_slots else None
        self._has_rings = has_rings
        self._routing = RoutingPages(shapes.page_size) if has_routing else None
        self._cache = PrefixCache(limits.pages_per_shard, self._forget)
        self.pool = self._cache.pool
        self._has_cache = not (limits.state_slots and shapes.batch_invariant)
        self.residents: list[Sample] = []  # oldest first
        self._page_size = shapes.page_size
        self._pages_found = shapes.piece // shapes.page_size or 1  # and multiples of it
        self._keeps_drawn = not shapes.piece  # whether pages that Decodes have written may be found
        self._growth = pages_for(limits.decode_steps, shapes.page_size)  # that a Decode may add to a sample
        self._prompts: dict[SampleJob, KeptPrompt] = {}
        self._lent: list[int] = []  # pages that the planned command copies first

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
        return room or min(1, self._free_slots(part))

    def start(self, part: list[Sample], keep_prompt: bool) -> Start:
        """Make samples with common content resident; ``keep_prompt`` if more of the job's will start."""
        job, written = part[0].job, part[0].next_position
        full, partial = divmod(written, self._page_size)
        kept, hit = self._prompts.get(job) if part[0].is_at_prompt else None, self.cached(part)
        shared = hit.length // self._page_size
        if kept is None:
            self.pool.hold(hit.pages)
            pages = hit.pages[:shared] + self.pool.take(pages_for(written, self._page_size) - shared)
        else:
            pages = kept.pages
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
        experts = None
        if self._routing is not None and hit.length:
            experts = self._routing.of(self._prefix(part[0], hit.length)[1])
        start = Start(list(pages), hit.length if kept is None else written, hit.length, copies, experts)
        if self._states is not None:
            self._start_states(self._states, start, part, hit, kept)
        if keep_prompt and kept is None and part[0].is_at_prompt and self._free_slots(part):
            self.pool.hold(pages)
            (slot,) = self._states.take(1) if self._states is not None else [NOTHING]
            self._prompts[job] = KeptPrompt(list(pages), slot)
        return start

    def _start_states(
        self, states: StateCache, start: Start, part: list[Sample], hit: Hit, kept: KeptPrompt | None
    ) -> None:
        """Give each sample a slot, and note the copies that the first one begins with."""
        for sample, slot in zip(part, states.take(len(part)), strict=True):
            sample.state = slot
        if kept is not None:
            start.kept_states.append((kept.slot, part[0].state))
        elif hit.slot != NOTHING or not part[0].next_position:  # nothing is to be read before a Decode
            start.first_states.append((hit.slot, part[0].state))
            shared = hit.length // self._page_size
            start.first_pages.extend((page, start.pages[shared]) for page in hit.pages[shared:])
            self._lent += hit.pages[shared:]

    def cached(self, part: list[Sample]) -> Hit:
        """Return the beginning of the common content that is in the prefix cache, as far as it is usable."""
        first = part[0]
        if not self._has_cache or self.keeps_prompt(part):
            return NO_HIT
        most = first.next_position
        if first.job.wants_scores(most):
            most = first.job.scoring.first_scored
        content, size = first.content, self._page_size
        keys = self._keys(first).first(most // size, content)
        if self._routing is not None:
            keys = self._routing.known(keys)
        if self._states is not None:
            is_usable = (lambda key: True) if self._routing is None else self._routing.knows
            hit = self._states.find(self._cache, first.job.scope, keys, content[:most], size, is_usable)
            return hit or NO_HIT
        pages = self._cache.find(keys)
        pages = pages[: len(pages) - len(pages) % self._pages_found]
        return Hit(NOTHING, len(pages) * size, pages)

    def count_cached(self, scope: str, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt are in the prefix cache, in whole pages."""
        keys, size, count = BlockKeys(scope, self._page_size), self._page_size, 0
        while (count + 1) * size < len(prompt) and self._cache.find(keys.first(count + 1, prompt)[-1:]):
            count += 1
        return count * size

    def _keys(self, sample: Sample) -> BlockKeys:
        if sample.keys is None or sample.keys.scope != sample.job.scope:
            sample.keys = BlockKeys(sample.job.scope, self._page_size)
        return sample.keys

    def _prefix(self, sample: Sample, length: int) -> tuple[Prefix, list[bytes]]:
        """Return the prefix of the first tokens of a sample's content, and the keys of its pages."""
        keys, content = self._keys(sample), sample.content[:length]
        full = keys.first(length // self._page_size, content)
        prefix = prefix_of(keys.scope, full, content, self._page_size)
        return prefix, [*full, prefix.key] if prefix.tail else full

    def remember_read(self, sample: Sample, pages: list[int], end: int) -> None:
        """Let the pages be found that sent or planned commands fill with a sample's content up to ``end``."""
        count = end // self._page_size
        if self._has_cache and count:
            self._cache.remember(self._keys(sample).first(count, sample.content), pages[:count])

    def remember_routing(self, sample: Sample) -> None:
        """Note the experts of a sample's tokens, as far as they are known and their pages are cached."""
        if self._routing is None or (experts_NLC := sample.routing) is None:
            return
        _, keys = self._prefix(sample, len(experts_NLC))
        self._routing.remember(keys[: len(self._cache.find(keys))], experts_NLC)

    def state_copies(self, prefill: ChunkedPrefill, *, has_room: bool) -> list[Copy]:
        """Return the copies of the state that the planned chunks leave.

        After the last one they are for the other samples, and for those that have yet to start; and, if
        ``has_room``, there is one for the prefix cache.
        """
        assert self._states is not None
        owner, end, targets = prefill.owner, prefill.first, list[int]()
        if prefill.is_planned:
            targets += [sample.state for sample in prefill.part[1:] if sample.prefill is prefill]
            kept = self._prompts.get(owner.job)
            if kept is not None and not kept.is_read and end == len(owner.job.prompt) - 1:
                kept.is_read = True
                targets.append(kept.slot)
        if has_room and self._has_cache and is_due(end, prefill.end):
            prefix = self._remember_end(owner, end, prefill.pages)
            slot = self._states.plan_copy(prefix)
            targets += [] if slot is None else [slot]
        return [(owner.state, target) for target in targets]

    def _remember_end(self, sample: Sample, length: int, pages: list[int]) -> Prefix:
        """Cache the pages of the first tokens of a sample's content, also a partly filled one."""
        prefix, _ = self._prefix(sample, length)
        self.remember_read(sample, pages, length)
        if prefix.tail:
            self._cache.remember_part(prefix.key, pages[length // self._page_size])
        return prefix

    def planned(self) -> None:
        """Note that no more is added to the Prefill that is planned."""
        self.pool.release(self._lent)
        self._lent = []
        if self._states is not None:
            self._states.sent()

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
                self.remember_read(sample, sample.pages, sample.position)
            self._leave_state(sample)
            if self._keeps_drawn:
                self.remember_routing(sample)
        else:
            sample.prefill.give_up(sample)
            if sample.prefill.is_given_up:
                self.forget_prompt(sample.job)
            sample.prefill = None
            self.drop_state(sample)
        if sample.outstanding and self._keeps_drawn:
            sample.left = [(page, self.pool.takes(page)) for page in sample.pages]
        self.pool.release(sample.pages)
        sample.pages, sample.is_resident = [], False

    def _leave_state(self, sample: Sample) -> None:
        """Let the state of a sample that leaves be found, unless commands in flight still change it."""
        is_over = sample.stop_reason is not None or sample.job.is_over
        if self._has_cache and sample.outstanding and not is_over:
            return  # once its tokens are known, remember_state_left is called
        if self._states is not None and self._has_state_to_keep(sample):
            prefix = self._remember_end(sample, sample.position, sample.pages)
            self._states.keep(sample.state, prefix)
            sample.state = NOTHING
        self.drop_state(sample)

    def _has_state_to_keep(self, sample: Sample) -> bool:
        """Say whether a state, once all sent commands have run, is that before the last token."""
        if not self._has_cache or not sample.position or sample.is_spoilt:
            return False
        if sample.stop_reason is None:
            return not sample.outstanding
        return ends_on_device(sample.stop_reason, sample.tokens[-1], sample.job.rule.device_tokens)

    def lend_slots(self, samples: list[Sample]) -> list[Sample]:
        """Give followers in the next command slots for their states, or let there be fewer of them.

        They need them no longer than that command, so whatever comes next may have them. In a ring there is
        room for them beside their leader.
        """
        if self._states is None or self._has_rings:
            return samples
        lent = list[int]()
        for sample in samples:
            if sample.guess is not None:
                free = self._states.take(min(self._states.free, sample.guess.followers))
                sample.guess, lent = sample.guess.within(free), lent + free
        self._states.release(lent)
        return samples

    def drop_state(self, sample: Sample) -> None:
        """Release the slot of a sample whose state nobody needs, if it has one."""
        self._release_slot(sample.state)
        sample.state = NOTHING

    def _release_slot(self, slot: int) -> None:
        if self._states is not None and slot != NOTHING:
            self._states.release([slot])

    def remember_what_is_left(self, sample: Sample) -> None:
        """Cache the pages that a sample gave back, and its state, now that all of its tokens are known."""
        count = sample.position // self._page_size
        if sample.state != NOTHING:
            self.remember_state_left(sample)
        elif self._has_cache and sample.left and count:
            self._cache.recall(self._keys(sample).first(count, sample.content), sample.left[:count])
            self.remember_routing(sample)
        sample.left = []

    def remember_state_left(self, sample: Sample) -> None:
        """Let the state of a sample, and the pages that it gave back, be found if it has a state to keep."""
        if self._states is not None and sample.state != NOTHING and self._has_state_to_keep(sample):
            prefix, keys = self._prefix(sample, sample.position)
            full = sample.position // self._page_size
            if prefix.tail:
                self._cache.recall_part(prefix.key, *sample.left[full])
            self._cache.recall(keys[:full], sample.left[:full])
            if len(self._cache.find(keys)) == len(keys):
                self._states.keep(sample.state, prefix)
                sample.state = NOTHING
            self.remember_routing(sample)
        self.drop_state(sample)

    def forget_prompt(self, job: SampleJob) -> None:
        kept = self._prompts.pop(job, None)
        if kept is not None:
            self.pool.release(kept.pages)
            self._release_slot(kept.slot)

    def candidates(self, last_decode: int) -> list[Sample]:
        """Return the samples for the rows of the next Decode, oldest first; samplers share rows evenly."""
        able = [each for each in self.residents if each.may_decode(last_decode)]
        if len(able) <= self.rows:
            return able
        seen: Counter[str] = Counter()
        ranks = {}
        for sample in able:
            ranks[sample] = seen[sample.job.sampler]
            seen[sample.job.sampler] += 1
        chosen = sorted(able, key=lambda sample: (ranks[sample], sample.age))[: self.rows]
        return sorted(chosen, key=lambda sample: sample.age)

    def grow(self, samples: Sequence[Sample], steps: int) -> bool:
        """Give samples the pages that a Decode of ``steps`` steps may write; False if too few are free."""
        counts = [each.last_position(steps) // self._page_size + 1 - len(each.pages) for each in samples]
        missing = sum([count for count in counts if count > 0])
        if missing > self.pool.free:
            return False
        pages = iter(self.pool.take(missing))
        for sample, count in zip(samples, counts, strict=True):
            if count > 0:
                sample.pages += islice(pages, count)
        return True

    def drop_a_prompt(self) -> bool:
        """Give up the youngest kept prompt with pages that no sample holds; False if there is none.

        Its pages are free once no other kept prompt, of the same tokens, holds them.
        """
        kept = Counter(page for prompt in self._prompts.values() for page in prompt.pages)
        for job in sorted(self._prompts, key=lambda job: job.number, reverse=True):
            if any(self.pool.holders(page) == kept[page] for page in self._prompts[job].pages):
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

    def _free_slots(self, part: list[Sample]) -> int:
        """Return how many samples of a part may have a state."""
        return len(part) if self._states is None else self._states.free

    def _fitting(self, part: list[Sample], is_newcomer: bool) -> int:
        written = part[0].next_position
        partial = 1 if written % self._page_size else 0
        common = 0
        if not self.keeps_prompt(part):
            hit = self.cached(part)
            shared = hit.length // self._page_size
            common = written // self._page_size - sum(map(self.pool.is_held, hit.pages[:shared]))
            common += sum(not self.pool.is_held(page) for page in hit.pages[shared:])
        left = self.pool.free - common
        fitting = max(0, left - self._growth * len(self.residents)) // (partial + self._growth)
        if not fitting and left >= partial and (is_newcomer or not self.residents):
            fitting = 1
        return min(fitting, len(part), self._free_slots(part))

    def keeps_prompt(self, part: list[Sample]) -> bool:
        """Say whether pages are kept that hold the common content of these samples."""
        return part[0].is_at_prompt and part[0].job in self._prompts

    def _forget(self, key: bytes) -> None:
        if self._states is not None:
            self._states.forget(key)
        if self._routing is not None:
            self._routing.forget(key)

    def _forget_prompts_but(self, job: SampleJob | None) -> None:
        for other in [each for each in self._prompts if each is not job]:
            self.forget_prompt(other)
