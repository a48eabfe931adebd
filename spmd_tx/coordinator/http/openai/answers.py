"""What was drawn, in OpenAI's words: one answer, or the events of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from spmd_tx.coordinator.http.openai import schemas as oai
from spmd_tx.coordinator.http.openai.stream import Delta
from spmd_tx.coordinator.sampling.stops import HALF_CHARACTER, Decoder
from spmd_tx.coordinator.wire.sampling_protobuf import TopLogprobs

DONE = b"data: [DONE]\n\n"
SIGN_OF_LIFE = b": still working\n\n"  # a comment; clients skip it


class Form(Protocol):
    """How one kind of request is answered."""

    def answer(self, pieces: Sequence[Delta], usage: oai.Usage) -> msgspec.Struct:
        """The pieces are whole choices."""
        ...

    def opening(self, index: int) -> msgspec.Struct | None:
        """The first event of a choice, if it has one before its first piece."""
        ...

    def event(self, piece: Delta) -> msgspec.Struct: ...

    def last(self, usage: oai.Usage) -> msgspec.Struct:
        """The event that tells the usage."""
        ...


@dataclass(frozen=True)
class Answering:
    """What all answers to one call have in common."""

    id: str
    created: int  # seconds since the epoch
    model: str
    decoder: Decoder
    has_logprobs: bool
    has_token_ids: bool

    def token_ids(self, piece: Delta) -> list[int] | UnsetType:
        return piece.tokens if self.has_token_ids else UNSET

    def token(self, token: int) -> str:
        return self.decoder.decode([token], skip_special_tokens=False)

    def likeliest(self, top: TopLogprobs, place: int) -> list[tuple[str, float]]:
        """Text and log-probability of the likeliest tokens in a place, from the likeliest on."""
        tokens, logprobs = top.tokens[place].tolist(), top.logprobs[place].tolist()
        return [(self.token(token), logprob) for token, logprob in zip(tokens, logprobs, strict=True)]


@dataclass(frozen=True)
class CompletionForm:
    """Of completions: answers and events look the same."""

    answering: Answering

    def answer(self, pieces: Sequence[Delta], usage: oai.Usage) -> oai.Completion:
        return self._completion([self._choice(piece) for piece in pieces], usage)

    def opening(self, index: int) -> None:
        return None

    def event(self, piece: Delta) -> oai.Completion:
        return self._completion([self._choice(piece)])

    def last(self, usage: oai.Usage) -> oai.Completion:
        return self._completion([], usage)

    def _completion(
        self, choices: list[oai.CompletionChoice], usage: oai.Usage | UnsetType = UNSET
    ) -> oai.Completion:
        common = self.answering
        return oai.Completion(
            id=common.id, created=common.created, model=common.model, choices=choices, usage=usage
        )

    def _choice(self, piece: Delta) -> oai.CompletionChoice:
        common, logprobs = self.answering, None
        if common.has_logprobs:
            tokens = [common.token(token) for token in piece.tokens]
            logprobs = oai.CompletionLogprobs(tokens, piece.logprobs, piece.offsets, self._top(piece, tokens))
        return oai.CompletionChoice(
            piece.index, piece.text, piece.finish_reason, logprobs, common.token_ids(piece)
        )

    def _top(self, piece: Delta, drawn: list[str]) -> list[dict[str, float]] | None:
        if piece.top is None:
            return None
        by_text: list[dict[str, float]] = [{} for _ in drawn]
        for place, (token, logprob) in enumerate(zip(drawn, piece.logprobs, strict=True)):
            for other, its_logprob in self.answering.likeliest(piece.top, place):
                by_text[place].setdefault(other, its_logprob)  # of tokens with one text the likeliest
            by_text[place].setdefault(token, logprob)
        return by_text


@dataclass(frozen=True)
class ChatForm:
    """Of chat completions: an answer has messages, an event what is new of them."""

    answering: Answering

    def answer(self, pieces: Sequence[Delta], usage: oai.Usage) -> oai.ChatCompletion:
        common = self.answering
        choices = [
            oai.ChatChoice(
                piece.index,
                oai.ChatMessage("assistant", piece.text),
                piece.finish_reason,
                self._logprobs(piece),
                common.token_ids(piece),
            )
            for piece in pieces
        ]
        return oai.ChatCompletion(
            id=common.id, created=common.created, model=common.model, choices=choices, usage=usage
        )

    def opening(self, index: int) -> oai.ChatChunk:
        return self._chunk([oai.ChatChunkChoice(index, oai.ChatDelta(role="assistant", content=""))])

    def event(self, piece: Delta) -> oai.ChatChunk:
        delta = oai.ChatDelta(content=piece.text or UNSET)
        logprobs, token_ids = self._logprobs(piece), self.answering.token_ids(piece)
        return self._chunk(
            [oai.ChatChunkChoice(piece.index, delta, piece.finish_reason, logprobs, token_ids)]
        )

    def last(self, usage: oai.Usage) -> oai.ChatChunk:
        return self._chunk([], usage)

    def _chunk(
        self, choices: list[oai.ChatChunkChoice], usage: oai.Usage | UnsetType = UNSET
    ) -> oai.ChatChunk:
        common = self.answering
        return oai.ChatChunk(
            id=common.id, created=common.created, model=common.model, choices=choices, usage=usage
        )

    def _logprobs(self, piece: Delta) -> oai.ChatLogprobs | None:
        if not self.answering.has_logprobs:
            return None
        texts = [self.answering.token(token) for token in piece.tokens]
        return oai.ChatLogprobs(
            [
                oai.TokenLogprob(text, logprob, _whole_bytes(text), self._top(piece, place))
                for place, (text, logprob) in enumerate(zip(texts, piece.logprobs, strict=True))
            ]
        )

    def _top(self, piece: Delta, place: int) -> list[oai.TopLogprob]:
        likeliest = [] if piece.top is None else self.answering.likeliest(piece.top, place)
        return [oai.TopLogprob(text, logprob, _whole_bytes(text)) for text, logprob in likeliest]


def _whole_bytes(text: str) -> list[int] | None:
    return None if HALF_CHARACTER in text else list(text.encode())


def is_worth_telling(piece: Delta, answering: Answering) -> bool:
    """Whether an event would say anything: tokens without text do only where tokens are asked for."""
    has_tokens = answering.has_logprobs or answering.has_token_ids
    return bool(piece.text) or piece.finish_reason is not None or (has_tokens and bool(piece.tokens))


def usage(prompts: Sequence[Sequence[int]], drawn: int) -> oai.Usage:
    read = sum(map(len, prompts))
    return oai.Usage(read, drawn, read + drawn)


def event(content: msgspec.Struct) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
