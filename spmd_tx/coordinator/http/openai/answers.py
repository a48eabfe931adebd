"""Formats samples as OpenAI's responses: the events of a stream, or a whole answer in pieces. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from spmd_tx.coordinator.http.openai import chat_messages, schemas
from spmd_tx.coordinator.http.text_generation.choices import ChoiceTokens, TextDelta
from spmd_tx.coordinator.http.text_generation.generation import TokenUsage
from spmd_tx.coordinator.sampling.request.stops import Decoder
from spmd_tx.coordinator.text.token_texts import HALF_CHARACTER

MOST_TEXTS = 1 << 14  # of tokens that a call remembers

TokenText: TypeAlias = tuple[str, list[int] | None]  # with its bytes, if they are whole characters


def token_texts(decoder: Decoder) -> Callable[[int], TokenText]:
    """Return what decodes a token. It remembers texts: the likeliest tokens come again and again."""

    @lru_cache(MOST_TEXTS)
    def text_of(token: int) -> TokenText:
        text = decoder.decode([token], skip_special_tokens=False)
        return text, None if HALF_CHARACTER in text else list(text.encode())

    return text_of


@dataclass(frozen=True)
class Answering:
    """Holds what all answers to one call have in common."""

    id: str
    created: int  # seconds since the epoch
    model: str
    texts: Callable[[int], TokenText]
    has_logprobs: bool
    has_token_ids: bool
    width: int  # likeliest tokens in the place of each drawn one

    def response(
        self,
        kind: schemas.ResponseKind,
        choices: Sequence[schemas.CompletionChoice | schemas.ChatChunkChoice],
        usage: schemas.CompletionUsage | UnsetType = UNSET,
    ) -> schemas.CompletionResponse:
        """Return an answer or an event with what all of this call have in common."""
        return schemas.CompletionResponse(
            id=self.id, object=kind, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def is_worth_sending(self, delta: TextDelta) -> bool:
        """Return whether a delta without text says something: tokens that are wanted, or its end."""
        has_tokens = self.has_logprobs or self.has_token_ids
        return delta.finish_reason is not None or (has_tokens and bool(delta.tokens))

    def token_ids(self, delta: TextDelta) -> list[int] | UnsetType:
        return delta.tokens if self.has_token_ids else UNSET

    def likeliest(self, delta: TextDelta, place: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens in a place and their log-probabilities, the likeliest first."""
        if delta.top is None:
            return []
        tokens, logprobs = delta.top.tokens[place].tolist(), delta.top.logprobs[place].tolist()
        return list(zip(tokens, logprobs, strict=True))


@dataclass(frozen=True)
class CompletionFormat:
    """Formats completions: answers and events have the same format."""

    answering: Answering

    def opening(self, index: int) -> None:
        """Return the event of a choice before its first delta, if there is one."""
        return None

    def events(self, delta: TextDelta) -> list[schemas.CompletionResponse]:
        """Return the events of a delta: none if it says nothing."""
        if not (delta.text or self.answering.is_worth_sending(delta)):
            return []
        choice = self._choice(delta, self._logprobs(delta, self.entries(delta) or None))
        return [self.answering.response("text_completion", [choice])]

    def last(self, usage: schemas.CompletionUsage) -> schemas.CompletionResponse:
        """Return the event with the usage."""
        return self.answering.response("text_completion", [], usage)

    def whole(self) -> schemas.CompletionResponse:
        """Return a whole answer without its choices, which are its last field."""
        return self.answering.response("text_completion", [])

    @property
    def list_begins(self) -> bytes:
        """What begins the list of a choice that is too long to keep until its end; empty: there is none."""
        return b'"logprobs":{"top_logprobs":[' if self.answering.width else b""

    def entries(self, delta: TextDelta) -> list[dict[str, float] | None]:
        """Return what a delta adds to that list."""
        if not self.answering.width:
            return []
        texts, entries = self.answering.texts, list[dict[str, float] | None]()
        for place, (token, logprob) in enumerate(zip(delta.tokens, delta.logprobs, strict=True)):
            by_text: dict[str, float] = {}
            for other, its_logprob in self.answering.likeliest(delta, place):
                by_text.setdefault(texts(other)[0], its_logprob)  # the likeliest token of each text
            by_text.setdefault(texts(token)[0], logprob)
            entries.append(None if math.isnan(logprob) else by_text)
        return entries

    def list_ends(self, choice: TextDelta) -> bytes:
        return b"]," + msgspec.json.encode(self._logprobs(choice, UNSET))[1:] + b","

    def choice(self, choice: TextDelta) -> schemas.CompletionChoice:
        """Return a choice without that list."""
        return self._choice(choice, UNSET if self.answering.width else self._logprobs(choice, None))

    def _choice(
        self, delta: TextDelta, logprobs: schemas.CompletionLogprobs | UnsetType | None
    ) -> schemas.CompletionChoice:
        assert delta.finish_reason != "tool_calls"
        ids = self.answering.token_ids(delta)
        return schemas.CompletionChoice(delta.index, delta.text, delta.finish_reason, logprobs, ids)

    def _logprobs(
        self, delta: TextDelta, top: list[dict[str, float] | None] | UnsetType | None
    ) -> schemas.CompletionLogprobs | None:
        if not self.answering.has_logprobs:
            return None
        tokens = [self.answering.texts(token)[0] for token in delta.tokens]
        return schemas.CompletionLogprobs(tokens, delta.logprobs, delta.offsets, top)


@dataclass(frozen=True)
class ChatFormat:
    """Formats chat completions as ``CompletionFormat`` does: an event has what is new of whole messages."""

    answering: Answering
    prompt: list[int] | UnsetType = UNSET  # tokens, if they are asked for

    def opening(self, index: int) -> schemas.CompletionResponse:
        choice = schemas.ChatChunkChoice(index, schemas.ChatDelta(role="assistant", content=""))
        opening = self.answering.response("chat.completion.chunk", [choice])
        return msgspec.structs.replace(opening, prompt_token_ids=self.prompt if index == 0 else UNSET)

    def events(self, delta: TextDelta) -> list[schemas.CompletionResponse]:
        says = chat_messages.deltas(delta.reply)
        if delta.finish_reason is not None or (not says and self.answering.is_worth_sending(delta)):
            says.append(schemas.ChatDelta())
        # All tokens stand beside the first of them: there is no telling which are whose.
        others = replace(delta, tokens=[], logprobs=[], forced=())
        last = len(says) - 1
        return [
            self._event(said, others if place else delta, delta.finish_reason if place == last else None)
            for place, said in enumerate(says)
        ]

    def _event(
        self, said: schemas.ChatDelta, tokens: TextDelta, finish: schemas.ChatFinish | None
    ) -> schemas.CompletionResponse:
        logprobs = schemas.ChatLogprobs(self.entries(tokens)) if self.answering.has_logprobs else None
        ids = self.answering.token_ids(tokens)
        choice = schemas.ChatChunkChoice(tokens.index, said, finish, logprobs, ids)
        return self.answering.response("chat.completion.chunk", [choice])

    def last(self, usage: schemas.CompletionUsage) -> schemas.CompletionResponse:
        return self.answering.response("chat.completion.chunk", [], usage)

    def whole(self) -> schemas.CompletionResponse:
        whole = self.answering.response("chat.completion", [])
        return msgspec.structs.replace(whole, prompt_token_ids=self.prompt)

    @property
    def list_begins(self) -> bytes:
        return b'"logprobs":{"content":[' if self.answering.has_logprobs else b""

    def entries(self, delta: TextDelta) -> list[schemas.TokenLogprob]:
        texts = self.answering.texts
        return [
            schemas.TokenLogprob(
                texts(token)[0],
                logprob,
                texts(token)[1],
                [
                    schemas.TopLogprob(texts(other)[0], its_logprob, texts(other)[1])
                    for other, its_logprob in self.answering.likeliest(delta, place)
                ],
                True if delta.forced and delta.forced[place] else UNSET,
            )
            for place, (token, logprob) in enumerate(zip(delta.tokens, delta.logprobs, strict=True))
        ]

    def list_ends(self, choice: TextDelta) -> bytes:
        return b"]},"

    def choice(self, choice: TextDelta) -> schemas.ChatChoice:
        message = chat_messages.message(choice.reply)
        logprobs = UNSET if self.answering.has_logprobs else None
        ids = self.answering.token_ids(choice)
        return schemas.ChatChoice(choice.index, message, choice.finish_reason, logprobs, ids)


ResponseFormat = CompletionFormat | ChatFormat


class WholeAnswer:
    """Writes an answer that is no stream, delta by delta. Those of a choice must follow each other."""

    def __init__(self, form: ResponseFormat) -> None:
        self._form = form
        self._choices = 0
        self._deltas = list[TextDelta]()  # of the choice that is being written, without likeliest tokens
        self._has_entries = False

    def begin(self) -> bytes:
        return msgspec.json.encode(self._form.whole()).removesuffix(b"]}")

    def add(self, delta: TextDelta) -> bytes:
        form, pieces = self._form, list[bytes]()
        if not self._deltas:
            pieces += [b"," if self._choices else b"", b"{", form.list_begins]
        if form.list_begins and (entries := form.entries(delta)):
            pieces += [b"," if self._has_entries else b"", msgspec.json.encode(entries)[1:-1]]
            self._has_entries = True
        self._deltas.append(replace(delta, top=None))
        if delta.finish_reason is not None:
            choice = _joined(self._deltas)
            pieces += [form.list_ends(choice) if form.list_begins else b""]
            pieces += [msgspec.json.encode(form.choice(choice))[1:]]
            self._choices += 1
            self._deltas, self._has_entries = [], False
        return b"".join(pieces)

    def piece(self, piece: Sequence[ChoiceTokens]) -> bytes:
        """Return the text of a piece."""
        return b"".join(self.add(part.choice.delta(part)) for part in piece)

    def end(self, usage: schemas.CompletionUsage) -> bytes:
        return b'],"usage":' + msgspec.json.encode(usage) + b"}"


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        logprobs=[logprob for delta in deltas for logprob in delta.logprobs],
        offsets=[offset for delta in deltas for offset in delta.offsets],
        reply=[part for delta in deltas for part in delta.reply],
    )


def usage(spent: TokenUsage) -> schemas.CompletionUsage:
    return schemas.CompletionUsage(
        spent.prompt,
        spent.sampled,
        spent.prompt + spent.sampled,
        schemas.PromptTokensDetails(spent.cached),
        schemas.CompletionTokensDetails(spent.reasoning),
    )
