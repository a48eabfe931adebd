"""Scores of a prompt's tokens: checks a request's options, prepares device inputs, reads results. Pure.

Dimension key: L prompt token, K likeliest tokens, W named tokens, B T rows of a Prefill.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spmd_tx.coordinator.sampling.request.target_tokens import NO_TOKEN, TargetTokens, read
from spmd_tx.coordinator.wire.sampling import SampleRequest
from spmd_tx.coordinator.wire.sampling_protobuf import NO_LOGPROB, PromptScores, TopLogprobs
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.placed import PlacedImage
from spmd_tx.protocol.commands import PromptWishes

MOST_PER_TOKEN = 256  # likeliest, named or drawn tokens at one position
MOST_CELLS = 1 << 20  # values of one kind in one request: tokens times values per token
NARROWEST = 4  # least of the widths on the device; each width is compiled once


class Scores(NamedTuple):
    """Says what a Prefill's program computes of prompts. Widths are 0 where nothing is computed."""

    logprobs: bool = False
    top: int = 0
    named: int = 0
    draws: int = 0

    def and_of(self, other: "Scores") -> "Scores":
        return Scores(
            self.logprobs or other.logprobs,
            max(self.top, other.top),
            max(self.named, other.named),
            max(self.draws, other.draws),
        )


def width(count: int, most: int = MOST_PER_TOKEN) -> int:
    """Return how many values per token the device computes when ``count`` are wanted: a power of two."""
    return min(1 << (max(NARROWEST, count) - 1).bit_length(), most) if count else 0


@dataclass(frozen=True)
class PromptScoring:
    """Holds what one request asks of its prompt."""

    length: int  # tokens of the prompt
    last: int  # how many of the last tokens get log-probabilities and likeliest tokens
    logprobs: bool
    top: int
    targets: TargetTokens | None
    draws: int
    seeds: tuple[int, int]  # for the draws
    temperature: float
    images: tuple[PlacedImage, ...] = ()  # whose tokens get no scores

    @property
    def is_empty(self) -> bool:
        return not self.logprobs and self.needs_only_logprobs

    @property
    def needs_only_logprobs(self) -> bool:
        return not self.top and self.targets is None and not self.draws

    @property
    def first_scored(self) -> int:
        """The first prompt token whose scores are wanted: from here on the prefix cache is of no use."""
        firsts = [0] if self.draws else []
        if self.logprobs or self.top:
            firsts.append(max(1, self.length - self.last) - 1)
        if self.targets is not None:
            firsts.append(int(self.targets.rows[0]))
        return min(firsts, default=self.length - 1)

    def scores(self, arrays: Mapping[str, np.ndarray]) -> PromptScores:
        """Convert a Prefill's arrays [L - 1, ...], which cover all prompt tokens but the last."""
        unscored = max(1, self.length - self.last)  # the first token has no log-probability
        logprobs = top = targets = None
        if self.logprobs:
            logprobs = np.full(self.length, np.nan, np.float32)
            logprobs[unscored:] = arrays["logprobs"][unscored - 1 :]
        if self.top:
            top = TopLogprobs.none(self.length, self.top)
            top.tokens[unscored:] = arrays["top_tokens"][unscored - 1 :, : self.top]
            top.logprobs[unscored:] = arrays["top_logprobs"][unscored - 1 :, : self.top]
        for image in self.images:
            place = slice(image.first, image.end)
            if logprobs is not None:
                logprobs[place] = np.nan
            if top is not None:
                top.tokens[place], top.logprobs[place] = 0, NO_LOGPROB
        if self.targets is not None:
            targets = self.targets.answer(arrays["target_logprobs"])
        drawn = [
            arrays[name][:, : self.draws].copy() if self.draws else None
            for name in ("drawn_tokens", "drawn_logprobs")
        ]
        return PromptScores(logprobs, top, targets, *drawn)

    def scores_of_one_token(self) -> PromptScores:
        """Return the scores of a prompt of one token, which needs no Prefill."""
        nothing = np.zeros((0, MOST_PER_TOKEN), np.float32)
        names = ("top_tokens", "top_logprobs", "drawn_tokens", "drawn_logprobs")
        return self.scores({"logprobs": nothing[:, 0], **dict.fromkeys(names, nothing)})


def are_wanted(body: SampleRequest) -> bool:
    """Say whether a request asks for anything about its prompt."""
    wanted = body.prompt_logprobs, body.topk_prompt_logprobs, body.prompt_alt_tokens_k
    return any(wanted) or body.target_prompt_logprobs is not None


def of(body: SampleRequest, prompt_length: int, vocab_size: int, seeds: tuple[int, int]) -> PromptScoring:
    """Read what a request asks. Raises InvalidRequest where its targets cannot be read."""
    top, targets = body.topk_prompt_logprobs or 0, body.target_prompt_logprobs
    last = body.prompt_logprobs_last_n
    return PromptScoring(
        length=prompt_length,
        last=prompt_length if last is None else last,
        logprobs=bool(body.prompt_logprobs),
        top=top,
        targets=None if targets is None else read(targets, prompt_length, vocab_size),
        draws=body.prompt_alt_tokens_k or 0,
        seeds=seeds,
        temperature=body.sampling_params.temperature,
        images=body.prompt.images,
    )


def check(body: SampleRequest, prompt_length: int, most_drawn: int, vocab_size: int) -> None:
    """Raise InvalidRequest when scores of the prompt, or of ``most_drawn`` sampled tokens, are too many."""
    targets = body.target_prompt_logprobs
    most_top = min(MOST_PER_TOKEN, vocab_size)
    wanted = [
        ("topk_prompt_logprobs", body.topk_prompt_logprobs or 0, most_top, prompt_length),
        ("topk_sample_logprobs", body.topk_sample_logprobs or 0, most_top, most_drawn),
        ("prompt_alt_tokens_k", body.prompt_alt_tokens_k or 0, MOST_PER_TOKEN, prompt_length),
    ]
    for name, count, most, tokens in wanted:
        if not 0 <= count <= most:
            raise InvalidRequest(f"{name} is {count}; it must be between 0 and {most}")
        _check_cells(name, count, tokens)
    _check_last(body, prompt_length)
    if targets is not None:
        named = read(targets, prompt_length, vocab_size).width
        if named > MOST_PER_TOKEN:
            raise InvalidRequest(
                f"target_prompt_logprobs names {named} tokens at one position; at most {MOST_PER_TOKEN} are "
                "taken, so spread them over several requests"
            )
        _check_cells("target_prompt_logprobs", named, prompt_length)


def _check_cells(name: str, count: int, tokens: int) -> None:
    if count * tokens > MOST_CELLS:
        raise InvalidRequest(
            f"{name} wants {count} values for each of up to {tokens} tokens; at most {MOST_CELLS} values are "
            "given by one request, so ask for fewer, or for fewer tokens at once"
        )


def _check_last(body: SampleRequest, prompt_length: int) -> None:
    last = body.prompt_logprobs_last_n
    if last is None:
        return
    if not body.prompt_logprobs:
        raise InvalidRequest(
            f"prompt_logprobs_last_n is {last} and prompt_logprobs is not set; set it, or leave last_n out"
        )
    if not 1 <= last <= prompt_length - 1:
        raise InvalidRequest(
            f"prompt_logprobs_last_n is {last} and the prompt has {prompt_length} tokens; it must be at "
            f"least 1 and at most {prompt_length - 1}, since the first token has no log-probability"
        )


def for_device(
    shape: tuple[int, int], placed: Sequence[tuple[PromptScoring, tuple[int, slice], int]], vocab_size: int
) -> PromptWishes | None:
    """Return the scoring inputs of a Prefill [B, T]; None: log-probabilities suffice.

    Each prompt in ``placed`` has its row, its columns there, and the position of its first token.
    """
    scorings = [each for each, _, _ in placed]
    if all(each.needs_only_logprobs for each in scorings):
        return None
    named = max((each.targets.width for each in scorings if each.targets is not None), default=0)
    device = PromptWishes(
        top=width(max(each.top for each in scorings), vocab_size),
        targets=np.full((*shape, width(named)), NO_TOKEN, np.int32),
        draws=width(max(each.draws for each in scorings)),
        seeds=np.zeros((*shape, 2), np.uint32),
        temperatures=np.ones(shape, np.float32),
    )
    for each, (row, place), first in placed:
        if each.targets is not None:
            tokens = each.targets.tokens[first : first + place.stop - place.start]
            device.targets[row, place, : each.targets.width] = tokens
        device.seeds[row, place], device.temperatures[row, place] = each.seeds, each.temperature
    return device
