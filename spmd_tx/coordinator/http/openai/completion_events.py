"""Writes the events of a stream of completions or of a chat completion. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from spmd_tx.coordinator.http.openai import answers, errors
from spmd_tx.coordinator.http.openai.answers import ResponseFormat
from spmd_tx.coordinator.http.text_generation.choices import ChoiceTokens
from spmd_tx.coordinator.http.text_generation.generation import TokenUsage

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still working\n\n"  # a comment; clients skip it


@dataclass(frozen=True)
class CompletionEvents:
    """Writes one stream, whose choices have these indices."""

    form: ResponseFormat
    indices: Sequence[int]
    wants_usage: bool

    def opening(self) -> bytes:
        openings = [self.form.opening(index) for index in self.indices]
        return b"".join(_event(each) for each in openings if each is not None)

    def piece(self, piece: Sequence[ChoiceTokens]) -> bytes:
        return b"".join(
            _event(event) for part in piece for event in self.form.events(part.choice.delta(part))
        )

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def closing(self, usage: TokenUsage) -> bytes:
        return (_event(self.form.last(answers.usage(usage))) if self.wants_usage else b"") + DONE

    def failure(self, message: str, status: int) -> bytes:
        return _event(errors.error_body(message, status)) + DONE


def _event(content: msgspec.Struct) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
