"""One sample of a call: what is new of it, copied for a thread that writes it, and how its text goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from spmd_tx.coordinator.http.text_generation.detokenize import SampleText
from spmd_tx.coordinator.http.text_generation.replies import ReplyPart, ReplyProgress
from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.text.reply_events import ReplyContent
from spmd_tx.coordinator.wire.sampling_protobuf import PromptScores, SampledSequence, TopLogprobs

TOKEN_COST = 16  # of making a token into text, where writing one of the likeliest tokens costs 1

PartialSample: TypeAlias = Sample | SampledSequence  # while it is drawn, or from its result


def echoed(prompt: list[int], scores: PromptScores, sample: SampledSequence) -> SampledSequence:
    """Put a prompt with its scores before a sample, as one row of tokens; the first one has NaN."""
    logprobs = [] if scores.logprobs is None else scores.logprobs.tolist()
    tops = [top for top in (scores.top, sample.top) if top is not None]
    return SampledSequence(
        [*prompt, *sample.tokens],
        [*logprobs, *sample.logprobs],
        sample.stop_reason,
        TopLogprobs.join(tops) if tops else None,
        [*[False] * len(prompt), *sample.forced] if sample.forced else (),
    )


@dataclass(frozen=True)
class ChoiceTokens:
    """Holds a copy of tokens of one choice: a thread reads it while more are drawn."""

    choice: ChoiceProgress
    tokens: list[int]
    logprobs: list[float]
    top: TopLogprobs | None
    stop_reason: Literal["stop", "length"] | None  # None: more follows
    forced: Sequence[bool] = ()  # as in SampledSequence

    @property
    def cost(self) -> int:
        width = 0 if self.top is None else self.top.tokens.shape[1]
        return (1 + len(self.tokens)) * (TOKEN_COST + width)


@dataclass(frozen=True)
class TextDelta:
    """Holds a part with its text."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    offsets: list[int]  # of each token's text in the choice's text, in characters; empty unless wanted
    finish_reason: Literal["stop", "length", "tool_calls"] | None  # None: more follows
    top: TopLogprobs | None = None  # in the place of each token, if wanted
    reply: Sequence[ReplyPart] = ()  # what a chat makes of the text
    stop: str | None = None  # the stop string that has ended it
    forced: Sequence[bool] = ()  # as in SampledSequence


class ChoiceProgress:
    """Tracks one sample of a call, and how much of it was sent."""

    def __init__(
        self, index: int, text: SampleText, has_offsets: bool, reply: ReplyProgress | None = None
    ) -> None:
        """``reply`` reads the text of a chat; None: all of it is content."""
        self.index = index
        self.reply = reply
        self.sent = 0  # tokens
        self.is_over = False
        self._text = text
        self._has_offsets = has_offsets

    def take(self, sample: PartialSample | None, most: int) -> ChoiceTokens | None:
        """Return the next part that is new, of at most so many tokens, if there is one."""
        if sample is None or self.is_over:
            return None
        first, drawn = self.sent, len(sample.tokens)
        end = min(drawn, first + most)
        stop_reason = sample.stop_reason if end == drawn else None
        if end <= first and stop_reason is None:
            return None
        self.sent, self.is_over = max(first, end), stop_reason is not None
        return ChoiceTokens(
            self,
            sample.tokens[first:end],
            sample.logprobs[first:end],
            sample.top_of(first, end),
            stop_reason,
            sample.forced[first:end],
        )

    def delta(self, part: ChoiceTokens) -> TextDelta:
        """Make the text of a part. Parts must come in order."""
        texts, offsets = list[str](), list[int]()
        for tokens in self._at_once(part.tokens):
            offsets.append(self._text.length)
            texts.append(self._text.add(tokens))
        is_end, finish = part.stop_reason is not None, part.stop_reason
        if is_end:
            texts.append(self._text.end())
        text = "".join(texts)
        reply: Sequence[ReplyPart] = [ReplyContent(text)] if text else ()
        if self.reply is not None:
            reply = self.reply.read(texts, is_end=is_end)
            finish = "tool_calls" if finish == "stop" and self.reply.calls else finish
        offsets = offsets if self._has_offsets else []
        return TextDelta(
            self.index,
            text,
            part.tokens,
            part.logprobs,
            offsets,
            finish,
            part.top,
            reply,
            self._text.stop,
            part.forced,
        )

    def _at_once(self, tokens: list[int]) -> list[list[int]]:
        """Return the tokens in pieces of which the text of each must be known."""
        return [[token] for token in tokens] if self._has_offsets or self.reply else [tokens]
