"""A sample request in the batch: its samples, its chunked prefill, and its encoded result. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from spmd_tx.coordinator.grammar.compiler import CompiledGrammar
from spmd_tx.coordinator.grammar.guide import Guide
from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.images.seen import SeenImages
from spmd_tx.coordinator.requests.records import DrawnFacts, Finished
from spmd_tx.coordinator.requests.sample_notes import ROUTING, STABILITY
from spmd_tx.coordinator.sampling import routing_notes, stability_notes
from spmd_tx.coordinator.sampling.bank import VersionKey
from spmd_tx.coordinator.sampling.cache.pages import BlockKeys
from spmd_tx.coordinator.sampling.prefill import PrefillChunk, PromptSegment
from spmd_tx.coordinator.sampling.request.prompt_images import PromptImages
from spmd_tx.coordinator.sampling.request.prompt_scores import PromptScoring
from spmd_tx.coordinator.sampling.request.stops import StopRule, StopWatch
from spmd_tx.coordinator.sampling.speculation.guess import Guess
from spmd_tx.coordinator.tenancy.spent import Usage
from spmd_tx.coordinator.wire.sampling_protobuf import (
    NO_SCORES,
    PromptScores,
    SampledSequence,
    TopLogprobs,
    encode_sample_response,
)
from spmd_tx.coordinator.wire.training_protobuf import PROTOBUF
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.placed import PlacedImage

NEVER = -1


@dataclass(eq=False)
class Sample:
    """Holds one continuation of a prompt. Its tokens depend on its job and its seeds alone."""

    job: SampleJob
    index: int
    settings: bytes  # of its row in every Decode, with its seeds
    watch: StopWatch
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # [n, L, k] each: those of every token's predecessor
    experts: list[np.ndarray] = field(default_factory=list)
    # Likeliest tokens in the place of each token, if wanted
    tops: list[TopLogprobs] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None

    outstanding: int = 0  # tokens that sent commands draw unless it stops earlier
    # Known tokens to be fed to Decodes again, as their pages are gone; 0 unless its job is batch_invariant.
    behind: int = 0
    is_resident: bool = False  # holds pages, and takes part in Decodes
    prefill: ChunkedPrefill | None = None  # until all is planned; then it may join Decodes
    pages: list[int] = field(default_factory=list)  # in the order of positions
    shard: int = 0
    bank: int = 0
    keys: BlockKeys | None = None  # of its content's full pages
    # Pages that it gave back before all of its tokens were known, and how often each had been taken.
    left: list[tuple[int, int]] = field(default_factory=list)
    decode: int = NEVER  # number of the last Decode that it was in since it became resident
    row: int = 0  # its row in that Decode, local to the data shard
    state: int = 0  # slot of its state; 0: it has none
    placed: int = 0  # how many of its pages are in that row's table on the device
    guide: Guide | None = None  # of its grammar, if it has one
    begins_anew: bool = False  # its row of the last Decode is of no use: what that drew is not all taken
    refusals: int = 0  # how often what was drawn behind a refused token has been dropped
    is_spoilt: bool = False  # its state has read tokens that were dropped
    expected: list[int] = field(default_factory=list)  # what the model expects next, if it is known
    guess: Guess | None = None  # what rows that follow it read in its next Decode; None: no row does

    @property
    def age(self) -> tuple[bool, int, int]:
        """A sort key: the oldest sample has the least."""
        return not self.job.is_overdue, self.job.number, self.index

    @property
    def content(self) -> list[int]:
        return self.job.prompt + self.tokens

    @property
    def routing(self) -> np.ndarray | None:
        """The experts [N, L, C] of all tokens before ``position``; None if they are not known."""
        of_prompt = self.job.prompt_experts
        known = [*([] if of_prompt is None else [of_prompt]), *self.experts]
        routing = np.concatenate(known) if known else None
        return routing if routing is not None and len(routing) == self.position else None

    @property
    def top(self) -> TopLogprobs | None:
        """The likeliest tokens in the place of each token; None unless they are wanted."""
        return TopLogprobs.join(self.tops) if self.tops else None

    def top_of(self, first: int, end: int) -> TopLogprobs | None:
        """Return the likeliest tokens in the places of some tokens, without copying all others."""
        parts, begin = list[TopLogprobs](), 0
        for part in self.tops:
            low, high = max(0, first - begin), min(len(part), end - begin)
            if low < high:
                parts.append(part[low:high])
            begin += len(part)
        return TopLogprobs.join(parts) if parts else None

    @property
    def forced(self) -> list[bool]:
        """Whether a grammar left no choice of each token; empty if it always did."""
        marks = [] if self.guide is None else self.guide.forced[: len(self.tokens)]
        return marks if any(marks) else []

    @property
    def position(self) -> int:
        """Position of the last known token, which is the input for the next one."""
        return len(self.job.prompt) + len(self.tokens) - 1

    @property
    def undecided(self) -> int:
        """Tokens to draw beyond those that are outstanding."""
        return self.job.max_tokens - len(self.tokens) - self.outstanding

    @property
    def is_masked(self) -> bool:
        """Whether its next Decode says which tokens are allowed, or draws but a few."""
        return self.guide is not None and not self.outstanding and not self.guide.is_trusted

    @property
    def draws_left(self) -> int:
        """Tokens that its next Decode may draw before they are checked."""
        if self.guide is None or not self.is_masked:
            return self.undecided
        return min(self.undecided, len(self.guide.ahead) + self.guide.most_draws)

    @property
    def steps_left(self) -> int:
        """Steps of Decodes to send: for known tokens, and for those to draw before they are checked."""
        undecided = self.job.max_tokens - len(self.tokens) - self.outstanding  # no call: asked for all rows
        return self.behind + (undecided if self.guide is None else self.draws_left)

    @property
    def steps_wanted(self) -> int:
        """Steps of Decodes whose tokens are likely to be of use."""
        if self.guide is None or not self.is_masked:
            return self.steps_left
        return self.behind + min(self.undecided, len(self.guide.ahead) + self.guide.reach)

    def may_decode(self, last_decode: int) -> bool:
        """Say whether it can take part in the next Decode.

        Its state must be on the device, because it was in the last Decode, or known, because no token of it
        is outstanding.
        """
        is_known = not self.outstanding or (self.decode == last_decode and not self.begins_anew)
        return is_known and self.prefill is None and self.steps_left > 0

    @property
    def next_position(self) -> int:
        """Position of the first token that the next Decode is fed. Before that, all tokens are read."""
        return len(self.job.prompt) + len(self.tokens) - 1 + self.outstanding - self.behind

    @property
    def is_at_prompt(self) -> bool:
        """Whether Prefills read nothing but the prompt when it starts."""
        return self.behind == len(self.tokens)

    def last_position(self, steps: int) -> int:
        """Return the last position whose keys and values a Decode of ``steps`` steps, sent now, may write."""
        tokens = steps if self.guess is None else steps * (1 + self.guess.followers)
        return self.next_position + min(tokens, self.steps_left) - 1

    def start_over(self) -> None:
        """Wait to become resident, with the tokens that are known."""
        self.is_spoilt = False
        self.behind = len(self.tokens) if self.job.batch_invariant else 0

    def drop_draws(self, *, has_read: bool) -> None:
        """Forget what sent commands draw: a token before it was refused. ``has_read``: by this Decode."""
        self.is_spoilt = bool(self.state) and (has_read or self.outstanding > 0)
        self.refusals += 1
        self.outstanding, self.begins_anew = 0, True

    def extend(
        self,
        tokens: list[int],
        logprobs: list[float],
        experts: np.ndarray | None = None,
        top: TopLogprobs | None = None,
    ) -> None:
        """Append drawn tokens, up to the one that ends the sample."""
        end = self.watch.end(tokens)
        if end is not None:
            self.stop_reason, tokens, logprobs = "stop", tokens[:end], logprobs[:end]
        self.tokens += tokens
        self.logprobs += logprobs
        if top is not None and self.job.top:
            self.tops.append(top[: len(tokens)])
        if experts is not None:
            self.experts.append(experts[: len(tokens)].copy())
        if end is None and len(self.tokens) == self.job.max_tokens:
            self.stop_reason = "length"


@dataclass(eq=False)
class SampleJob:
    """Holds one sample request and its state in the batch."""

    request_id: str
    number: int  # order of arrival
    version: VersionKey
    sampler: str  # samplers take turns
    session: str  # the prefix cache is not shared between sessions
    prompt: list[int]
    max_tokens: int
    rule: StopRule
    scoring: PromptScoring
    top: int  # how many of the likeliest tokens to return in the place of each drawn token
    records_stability: bool = False  # for stable_reinforce
    batch_invariant: bool = False  # whether the same programs must compute every token again
    images: tuple[PlacedImage, ...] = ()  # of the prompt, in which their tokens have negative ids
    sight: PromptImages | None = None  # those images, decoded
    wants_tokens: bool = True  # else one is drawn, since samples end by that, and nobody is told
    samples: list[Sample] = field(default_factory=list)

    scope: str = ""  # of its keys in the prefix cache: weights and session
    cache_hits: int | None = None  # tokens of the prompt that were found in the prefix cache
    waiting: list[Sample] = field(default_factory=list)  # for pages and a row; by index
    scores: PromptScores | None = None
    prompt_experts: np.ndarray | None = None  # [L - 1, layers, k]: not those of the prompt's last token
    needs_scores: bool = False  # until the Prefill that computes the prompt's scores is planned
    is_over: bool = False
    has_started: bool = False
    obstacle: str = "waiting for its turn"  # what keeps it from starting
    passed_over: int = 0  # jobs that started while it waited for pages, since it last drew a token
    is_overdue: bool = False  # passed over too often; counts as older than all jobs that were not
    is_lonely: bool = False  # planning may have failed because of it: it has commands of its own

    def restart(self, number: int) -> None:
        """Wait again, in a new batch, and keep the known tokens."""
        self.number = number
        for sample in self.samples:
            sample.outstanding, sample.decode = 0, NEVER
            sample.is_resident, sample.pages, sample.prefill, sample.state = False, [], None, 0
            sample.left = []
            sample.start_over()
        self.waiting = [sample for sample in self.samples if sample.stop_reason is None]
        self.needs_scores = not self.scoring.is_empty and self.scores is None
        self.has_started = self.is_overdue = False
        self.passed_over = 0

    def look_at(self, images: SeenImages, pool: ImagePool) -> None:
        """Take in the images of the prompt. Raises InvalidRequest if the devices cannot hold them."""
        if not pool.takes(images.values()):
            raise InvalidRequest(
                f"the largest images of the prompt have too many tokens; this server holds {pool.rows} of "
                "images at a time, so send smaller ones, or the operator raises --image-tokens"
            )
        self.sight = PromptImages(self.images, images)

    def constrain(self, grammar: CompiledGrammar, *, has_states: bool) -> None:
        """Let samples draw what the grammar allows. ``has_states``: of sequences, not to be rewound."""
        for sample in self.samples:
            sample.guide = grammar.guide(self.rule.tokens, is_cautious=has_states)

    def next_part(self) -> list[Sample]:
        """Return the samples to start next with a common prefill: a preempted one, or all that never ran."""
        resumed = next((sample for sample in self.waiting if not sample.is_at_prompt), None)
        return [resumed] if resumed is not None else list(self.waiting)

    def wants_scores(self, end: int) -> bool:
        """Return whether a chunk that ends before position ``end`` must be read with scores.

        They are computed once. If the job is batch-invariant, and their program is not that of other chunks,
        the same program reads the chunk every time.
        """
        is_special = self.batch_invariant and not self.scoring.needs_only_logprobs
        return (self.needs_scores or is_special) and end > self.scoring.first_scored

    def result(self) -> Finished:
        """Encode the response once all samples have ended."""
        sequences = [
            SampledSequence(sample.tokens, sample.logprobs, sample.stop_reason, sample.top, sample.forced)
            for sample in self.samples
            if sample.stop_reason is not None and self.wants_tokens
        ] or [SampledSequence([], [], "length", None) for _ in self.samples]
        hits = self.cache_hits or 0
        body = encode_sample_response(sequences, self.scores or NO_SCORES, hits)
        notes = {}
        if self.samples[0].experts and self.wants_tokens:
            experts = [np.concatenate(sample.experts) for sample in self.samples]
            notes[ROUTING] = routing_notes.encode(self.prompt_experts, experts)
        if self.records_stability:
            notes[STABILITY] = stability_notes.encode(sequences)
        sampled = sum(len(sequence.tokens) for sequence in sequences)
        spent = Usage(prompt=len(self.prompt), cached=hits, sampled=sampled)
        cut_off = sum(sequence.stop_reason == "length" for sequence in sequences)
        drawn = DrawnFacts(hash(tuple(self.prompt)), len(sequences), cut_off) if self.wants_tokens else None
        return Finished(PROTOBUF, body, notes=notes, spent=spent, rollouts=drawn)


@dataclass(eq=False)
class ChunkedPrefill:
    """Fills the pages of samples that start with common content, chunk by chunk."""

    part: list[Sample]  # the first one owns all pages that are written
    content: list[int]
    pages: list[int]
    first: int  # the next position to plan
    copies: dict[Sample, tuple[int, int]]  # (from, to): the last page, copied at the end
    is_given_up: bool = False
    # Replies, each from a position on
    _known: list[tuple[int, Mapping[str, np.ndarray]]] = field(default_factory=list)

    @property
    def job(self) -> SampleJob:
        return self.part[0].job

    @property
    def owner(self) -> Sample:
        return self.part[0]

    @property
    def end(self) -> int:
        """Position of the last token, which is the first Decode's input."""
        return len(self.content) - 1

    @property
    def is_planned(self) -> bool:
        """Whether all chunks are planned."""
        return self.first == self.end

    @property
    def copies_needed(self) -> int:
        """How many copies of pages or states the Prefill with its last chunk makes, at least."""
        return len(self.part) if self.owner.state else len(self.copies)

    def next_chunk(self, end: int) -> PrefillChunk:
        """Return the next chunk, which ends before position ``end``."""
        owner = self.owner
        return PrefillChunk(
            *(owner.shard, owner.job.version, owner.bank, self.content, self.pages),
            *(self.first, end, owner.state, owner.job.sight),
        )

    def take_cached(self, experts: np.ndarray | None) -> None:
        """Take the experts of the tokens that were found in the cache, if the model has any."""
        if experts is not None:
            self._known.append((0, {"experts": experts}))
            if self.is_planned:
                self._complete(experts)

    def _complete(self, experts: np.ndarray) -> None:
        if len(self.content) == len(self.job.prompt):
            self.job.prompt_experts = experts

    def give_up(self, sample: Sample) -> None:
        """Let a sample leave early. The pages are the owner's: without it, the prefill is given up."""
        self.copies.pop(sample, None)
        self.is_given_up |= sample is self.owner

    def absorb(
        self, segment: PromptSegment, row: int, arrays: Mapping[str, np.ndarray], is_scored: bool
    ) -> None:
        """Take the reply to a chunk. With the last one the prompt's scores are complete."""
        if self.is_given_up:
            return
        wanted = [name for name in arrays if is_scored or name == "experts"]
        known = {name: arrays[name][row, segment.place].copy() for name in wanted}
        self._known.append((segment.chunk.first, known))
        if segment.chunk.end < self.end:
            return
        whole = {name: self._whole(name) for name in wanted}
        experts = whole.pop("experts", None)
        if experts is not None:
            self._complete(experts)
        if is_scored:
            self.job.scores = self.job.scoring.scores(whole)

    def _whole(self, name: str) -> np.ndarray:
        """Join the replies; positions before the first one, which nobody asks for, are zeros."""
        parts = [(first, arrays[name]) for first, arrays in self._known if name in arrays]
        before = np.zeros((parts[0][0], *parts[0][1].shape[1:]), parts[0][1].dtype)
        return np.concatenate([before, *(array for _, array in parts)])


def job_scope(weights: str, session: str) -> str:
    """Return what keys in the prefix cache begin with: a session shares it, for one set of weights."""
    return f"{weights} {session}"
