"""Formats samples as OpenAI's responses: a whole answer, or the events of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from spmd_tx.coordinator.http.openai import schemas
from spmd_tx.coordinator.http.openai.stream import Delta
from spmd_tx.coordinator.sampling.request.stops import Decoder
from spmd_tx.coordinator.text.token_texts import HALF_CHARACTER
from spmd_tx.coordinator.wire.sampling_protobuf import TopLogprobs

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still working\n\n"  # a comment; clients skip it


class Form(Protocol):
    """Formats the answers to one kind of request."""

    def answer(self, deltas: Sequence[Delta], usage: schemas.Usage) -> msgspec.Struct:
        """Return the answer; each delta is a whole choice."""
        ...

    def opening(self, index: int) -> msgspec.Struct | None:
        """Return the event of a choice before its first delta, if there is one."""
        ...

    def event(self, delta: Delta) -> msgspec.Struct: ...

    def last(self, usage: schemas.Usage) -> msgspec.Struct:
        """Return the event with the usage."""
        ...


@dataclass(frozen=True)
class Answering:
    """Holds what all answers to one call have in common."""

    id: str
    created: int  # seconds since the epoch
    model: str
    decoder: Decoder
    has_logprobs: bool
    has_token_ids: bool

    def token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return delta.tokens if self.has_token_ids else UNSET

    def token(self, token: int) -> str:
        return self.decoder.decode([token], skip_special_tokens=False)

    def likeliest(self, top: TopLogprobs, place: int) -> list[tuple[str, float]]:
        """Return text and log-probability of the likeliest tokens in a place, the likeliest first."""
        tokens, logprobs = top.tokens[place].tolist(), top.logprobs[place].tolist()
        return [(self.token(token), logprob) for token, logprob in zip(tokens, logprobs, strict=True)]


@dataclass(frozen=True)
class CompletionForm:
    """Formats completions: answers and events have the same format."""

    answering: Answering

    def answer(self, deltas: Sequence[Delta], usage: schemas.Usage) -> schemas.Completion:
        return self._completion([self._choice(delta) for delta in deltas], usage)

    def opening(self, index: int) -> None:
        return None

    def event(self, delta: Delta) -> schemas.Completion:
        return self._completion([self._choice(delta)])

    def last(self, usage: schemas.Usage) -> schemas.Completion:
        return self._completion([], usage)

    def _completion(
        self, choices: list[schemas.CompletionChoice], usage: schemas.Usage | UnsetType = UNSET
    ) -> schemas.Completion:
        common = self.answering
        return schemas.Completion(
            id=common.id, created=common.created, model=common.model, choices=choices, usage=usage
        )

    def _choice(self, delta: Delta) -> schemas.CompletionChoice:
        common, logprobs = self.answering, None
        if common.has_logprobs:
            tokens = [common.token(token) for token in delta.tokens]
            logprobs = schemas.CompletionLogprobs(
                tokens, delta.logprobs, delta.offsets, self._top(delta, tokens)
            )
        return schemas.CompletionChoice(
            delta.index, delta.text, delta.finish_reason, logprobs, common.token_ids(delta)
        )

    def _top(self, delta: Delta, drawn: list[str]) -> list[dict[str, float]] | None:
        if delta.top is None:
            return None
        by_text: list[dict[str, float]] = [{} for _ in drawn]
        for place, (token, logprob) in enumerate(zip(drawn, delta.logprobs, strict=True)):
            for other, its_logprob in self.answering.likeliest(delta.top, place):
                by_text[place].setdefault(other, its_logprob)  # keeps the likeliest token of each text
            by_text[place].setdefault(token, logprob)
        return by_text


@dataclass(frozen=True)
class ChatForm:
    """Formats chat completions: an answer has whole messages, an event has what is new of them."""

    answering: Answering

    def answer(self, deltas: Sequence[Delta], usage: schemas.Usage) -> schemas.ChatCompletion:
        common = self.answering
        choices = [
            schemas.ChatChoice(
                delta.index,
                schemas.ChatMessage("assistant", delta.text),
                delta.finish_reason,
                self._logprobs(delta),
                common.token_ids(delta),
            )
            for delta in deltas
        ]
        return schemas.ChatCompletion(
            id=common.id, created=common.created, model=common.model, choices=choices, usage=usage
        )

    def opening(self, index: int) -> schemas.ChatChunk:
        return self._chunk([schemas.ChatChunkChoice(index, schemas.ChatDelta(role="assistant", content=""))])

    def event(self, delta: Delta) -> schemas.ChatChunk:
        content = schemas.ChatDelta(content=delta.text or UNSET)
        logprobs, token_ids = self._logprobs(delta), self.answering.token_ids(delta)
        return self._chunk(
            [schemas.ChatChunkChoice(delta.index, content, delta.finish_reason, logprobs, token_ids)]
        )

    def last(self, usage: schemas.Usage) -> schemas.ChatChunk:
        return self._chunk([], usage)

    def _chunk(
        self, choices: list[schemas.ChatChunkChoice], usage: schemas.Usage | UnsetType = UNSET
    ) -> schemas.ChatChunk:
        common = self.answering
        return schemas.ChatChunk(
            id=common.id, created=common.created, model=common.model, choices=choices, usage=usage
        )

    def _logprobs(self, delta: Delta) -> schemas.ChatLogprobs | None:
        if not self.answering.has_logprobs:
            return None
        texts = [self.answering.token(token) for token in delta.tokens]
        return schemas.ChatLogprobs(
            [
                schemas.TokenLogprob(text, logprob, _whole_bytes(text), self._top(delta, place))
                for place, (text, logprob) in enumerate(zip(texts, delta.logprobs, strict=True))
            ]
        )

    def _top(self, delta: Delta, place: int) -> list[schemas.TopLogprob]:
        likeliest = [] if delta.top is None else self.answering.likeliest(delta.top, place)
        return [schemas.TopLogprob(text, logprob, _whole_bytes(text)) for text, logprob in likeliest]


def _whole_bytes(text: str) -> list[int] | None:
    return None if HALF_CHARACTER in text else list(text.encode())


def is_worth_sending(delta: Delta, answering: Answering) -> bool:
    """Return whether an event has content: tokens without text are none unless tokens are asked for."""
    has_tokens = answering.has_logprobs or answering.has_token_ids
    return bool(delta.text) or delta.finish_reason is not None or (has_tokens and bool(delta.tokens))


def usage(prompts: Sequence[Sequence[int]], drawn: int) -> schemas.Usage:
    read = sum(map(len, prompts))
    return schemas.Usage(read, drawn, read + drawn)


def event(content: msgspec.Struct) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
