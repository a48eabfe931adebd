"""Turns rows into tokens with a weight each, by the model's own tokenizer and chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmd_tx.errors import StartError
from spmd_tx.train.rows import ChatRow, CompletionRow, DataRow, PreferenceRow, RowMessage, TextRow


@dataclass(frozen=True)
class LearnedTokens:
    """Tokens of one sequence, and for each whether it is learned."""

    tokens: list[int]
    is_learned: list[bool]

    @property
    def count(self) -> int:
        """How many targets are learned: the first token is never one."""
        return sum(self.is_learned[1:])


class Renderer:
    """Renders conversations of one model."""

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length  # tokens that are kept of a sequence

    def sequences(self, row: DataRow) -> list[LearnedTokens]:
        """Return what is learned of a row. Raises StartError where the template refuses it."""
        if isinstance(row, PreferenceRow):
            raise TypeError("a preference has two sequences; see pair()")
        if isinstance(row, TextRow):
            tokens = [*self._tokenizer.encode(row.text), *self._end()]
            found = [LearnedTokens(tokens, [True] * len(tokens))]
        elif isinstance(row, CompletionRow):
            found = [
                continued(self._tokenizer.encode(row.prompt), [*self._encode(row.completion), *self._end()])
            ]
        else:
            found = self._chat(row)
        return [each for each in map(self._cut, found) if each.count]

    def pair(self, row: PreferenceRow) -> tuple[LearnedTokens, LearnedTokens]:
        """Return the better and the worse answer, each behind the prompt, of which nothing is learned."""
        chosen, rejected = (
            self._cut(self._answered(row.prompt, each)) for each in (row.chosen, row.rejected)
        )
        return chosen, rejected

    def prompt(self, messages: Sequence[RowMessage]) -> list[int]:
        """Return the tokens behind which the model answers. Raises StartError as ``sequences`` does."""
        return self._encode(self._render(messages, is_asked=True))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without the marks of the template."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _chat(self, row: ChatRow) -> list[LearnedTokens]:
        """One sequence, or several where the template shows earlier turns otherwise later on."""
        found: list[LearnedTokens] = []
        for place, message in enumerate(row.messages):
            if message["role"] != "assistant":
                continue
            turn = self._answered(row.messages[:place], [message], row.tools)
            last = found.pop() if found else None
            if last is not None and turn.tokens[: len(last.tokens)] == last.tokens:
                turn = LearnedTokens(turn.tokens, [*last.is_learned, *turn.is_learned[len(last.tokens) :]])
            elif last is not None:
                found.append(last)
            found.append(turn)
        return found

    def _answered(
        self, before: Sequence[RowMessage], answer: Sequence[RowMessage], tools: Sequence[Any] | None = None
    ) -> LearnedTokens:
        question = self._render(before, tools, is_asked=True)
        whole = self._render([*before, *answer], tools, is_asked=False)
        if not whole.startswith(question):
            raise StartError(
                "the model's chat template begins an answer otherwise when it asks for one, so what is to be "
                f"learned cannot be told: {question[-60:]!r} is not in {whole[-120:]!r}"
            )
        # A template's line break behind the mark of a turn's end is not the model's to say.
        return continued(self._encode(question), self._encode(whole[len(question) :].rstrip("\n")))

    def _render(
        self, messages: Sequence[RowMessage], tools: Sequence[Any] | None = None, *, is_asked: bool
    ) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=is_asked
            )
        except Exception as problem:  # a template may raise anything
            raise StartError(f"the model's chat template refuses a conversation: {problem}") from problem

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _end(self) -> list[int]:
        """The token with which a text ends, if the model has one."""
        token = self._tokenizer.eos_token_id
        return [] if token is None else [token]

    def _cut(self, learned: LearnedTokens) -> LearnedTokens:
        if self._max_length is None or len(learned.tokens) <= self._max_length:
            return learned
        return LearnedTokens(learned.tokens[: self._max_length], learned.is_learned[: self._max_length])


def continued(prompt: list[int], answer: list[int]) -> LearnedTokens:
    """Return an answer's tokens, which are learned, behind those of its prompt, which are not."""
    return LearnedTokens([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
