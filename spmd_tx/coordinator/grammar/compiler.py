"""Compiles grammars, with limits on what one may cost, and keeps the latest.

A client's grammar may cost any time, and nest so deep that the compiler ends its process. So each one is
tried in a child process first, and compiled in a thread when it is known what that takes.
"""

import asyncio
import functools
import hashlib
import signal
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.conversation.messages import Conversation
from spmd_tx.coordinator.grammar.answer_grammars import AnswerStart, answer_grammar
from spmd_tx.coordinator.grammar.constraints import Constraint
from spmd_tx.coordinator.grammar.guide import Guide
from spmd_tx.coordinator.grammar.likely_masks import LikelyMasks
from spmd_tx.coordinator.grammar.refusals import ROW_ITEMS, refusal
from spmd_tx.coordinator.runtime.shared_children import OutsideCall
from spmd_tx.coordinator.runtime.threads import SMALL_BYTES, compute
from spmd_tx.coordinator.text.model_text import LazyModelText, ModelText
from spmd_tx.coordinator.text.prompt_texts import PromptTexts, lasting_model_text
from spmd_tx.coordinator.text.turn_reading import end_of_prompt
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest

KEPT = 64  # compiled grammars
SILENT = 0  # of llguidance's levels of logging
# Some 2 kB each; more than that would be built up by a token's mask, over many tokens.
LEXER_STATES = 50_000
MOST_SECONDS = 1.0  # of processor time, for one grammar
TRIAL_STACK = 1 << 20  # bytes; threads have 2 MiB at least, so that what fits there fits here

_HERE = "spmd_tx.coordinator.grammar.compiler"


@dataclass(frozen=True)
class CompiledGrammar:
    """Holds a compiled grammar, from which every sample starts."""

    matcher: LLMatcher
    vocab_size: int
    likely: LikelyMasks = field(default_factory=LikelyMasks)

    def guide(self, stops: Collection[int], *, is_cautious: bool) -> Guide:
        """Return a guide for a sample that these tokens end."""
        return Guide(self.matcher.deep_copy(), stops, self.vocab_size, self.likely, is_cautious=is_cautious)


class Grammars:
    """Compiles grammars for one base model."""

    def __init__(
        self, text: LazyModelText, vocab_size: int, most_bytes: int, prompt_texts: PromptTexts
    ) -> None:
        """Grammars are tried in the child processes of ``prompt_texts``."""
        self._text, self._vocab_size, self._most_bytes = text, vocab_size, most_bytes
        self._prompt_texts = prompt_texts
        self._reading: asyncio.Task[LLTokenizer] | None = None
        self._kept = OrderedDict[bytes, CompiledGrammar]()

    async def of_answer(
        self, constraint: Constraint, conversation: Conversation, prompt: Sequence[int]
    ) -> str | None:
        """Return the grammar of the answer to a conversation with this prompt; None: the answer is free.

        The grammar is known to compile; a SampleRequest takes it. Raises InvalidRequest.
        """
        if constraint.is_empty:
            return None
        tokenizer, text = await self._tokenizer(), await self._text.get()
        added = text.tokenizer.get_added_tokens_decoder()
        special = {each.content: id for id, each in added.items() if tokenizer.is_special_token(id)}
        start = AnswerStart(text.reply_format, end_of_prompt(text, prompt), special)
        try:
            grammar = answer_grammar(constraint, conversation, start)
        except RecursionError:
            raise InvalidRequest(
                "the schema of the answer, or of a tool, is nested too deeply; send a flatter one"
            ) from None
        if grammar is not None:
            await self.compile(grammar)
        return grammar

    async def compile(self, source: str) -> CompiledGrammar:
        """Compile a grammar in the dialect of Lark that llguidance reads. Raises InvalidRequest."""
        size = len(source.encode())
        if size > self._most_bytes:
            raise InvalidRequest(
                f"the grammar of the answer has {show_size(size)}, with all schemas in it; at most "
                f"{show_size(self._most_bytes)} are allowed (the operator raises the limit grammar_bytes)"
            )
        key = hashlib.sha256(source.encode()).digest()
        kept = self._kept.get(key)
        if kept is None:
            await self._try(source)
            tokenizer = await self._tokenizer()
            kept = CompiledGrammar(
                await compute(SMALL_BYTES, compile_source, tokenizer, source), self._vocab_size
            )
            self._kept[key] = kept
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return kept

    async def _try(self, source: str) -> None:
        """Raise InvalidRequest for a grammar that this process cannot compile, or not soon."""
        where = {"directory": self._prompt_texts.directory, "vocab_size": self._vocab_size}
        trial = OutsideCall(f"{_HERE}:try_outside", {"source": source, **where})
        try:
            await self._prompt_texts.call_outside(trial, OutsideCall(f"{_HERE}:be_ready", where))
        except ForeignCodeFailed as error:
            raise InvalidRequest(
                f"the schema or grammar of the answer takes more than {MOST_SECONDS:g} s to compile, "
                "nests too deep, or cannot be compiled; send a simpler one, with fewer optional properties "
                "in one object"
            ) from error

    async def _tokenizer(self) -> LLTokenizer:
        """Read the vocabulary, once; it takes seconds for a large one."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)

    async def _read(self) -> LLTokenizer:
        text = await self._text.get()
        return await asyncio.to_thread(_read_tokenizer, text, self._vocab_size)


def _read_tokenizer(text: ModelText, vocab_size: int) -> LLTokenizer:
    most = max(vocab_size, text.tokenizer.get_vocab_size(with_added_tokens=True))
    options: dict[str, Any] = {"eos_token": list(text.eos_token_ids)} if text.eos_token_ids else {}
    return LLTokenizer(text.tokenizer.to_str(), n_vocab=most, **options)


def compile_source(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar. Raises InvalidRequest."""
    grammar = LLMatcher.grammar_from_lark(source)
    limits = LLParserLimits(max_lexer_states=LEXER_STATES, max_items_in_row=ROW_ITEMS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=SILENT, limits=limits)
    begun = matcher.deep_copy()  # what is too much for the first token is known here, and not in the loop
    begun.consume_tokens(begun.compute_ff_tokens())
    begun.compute_bitmask()
    if begun.is_error():
        raise InvalidRequest(refusal(begun.get_error()))
    return matcher


def try_outside(source: str, directory: str, vocab_size: int) -> None:
    """Compile a grammar in a child process, which ends if that takes too much. Raises InvalidRequest."""
    tokenizer = _lasting_tokenizer(directory, vocab_size)
    with _limited(), ThreadPoolExecutor(1) as trial:
        trial.submit(compile_source, tokenizer, source).result()


@contextmanager
def _limited() -> Iterator[None]:
    """Limit the processor time of this process, and the stack of new threads, as long as it lasts.

    Behind it the process has at least the time again that its caller has left it.
    """
    before = signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    stack = threading.stack_size(TRIAL_STACK)
    try:
        yield
    finally:
        threading.stack_size(stack)
        signal.setitimer(signal.ITIMER_PROF, *before)


def be_ready(directory: str, vocab_size: int) -> None:
    """Read what the next trial needs, in a child process."""
    _lasting_tokenizer(directory, vocab_size)


@functools.cache
def _lasting_tokenizer(directory: str, vocab_size: int) -> LLTokenizer:
    """Read the vocabulary once in a child process that lasts."""
    return _read_tokenizer(lasting_model_text(directory), vocab_size)
