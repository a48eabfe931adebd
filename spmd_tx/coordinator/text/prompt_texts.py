"""Turns text into tokens, and tokens into text: what is short in a thread, the rest in a child process.

A text may be as large as a body, and a token takes memory and time for every one or two bytes. So texts are
measured in bytes first, and long ones have limits on both.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from spmd_tx.bounds import Bounds
from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.runtime.shared_children import OutsideCall, SharedChildren
from spmd_tx.coordinator.text import continuation, token_texts
from spmd_tx.coordinator.text.chat_template import TemplateMessage
from spmd_tx.coordinator.text.continuation import TailTokens, TurnEnd, TurnsToRender
from spmd_tx.coordinator.text.model_text import LazyModelText, ModelText, load_model_text
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest, PromptTooLong
from spmd_tx.processes.child import Allowance

SHORT_BYTES = 64 << 10  # which take some 50 ms
SHORT_TOKENS = 8 << 10  # as above, when they are made into text
CHILDREN = 3  # at a time
CHILDREN_OF_ONE = 2  # owner, so that others need not wait until its texts are done
SHRINKS = 4  # a normalizer may leave a third of the bytes

_HERE = "spmd_tx.coordinator.text.prompt_texts"


class PromptTexts:
    """Turns the texts that are sent to one model into tokens, and tokens into text, within its limits."""

    def __init__(self, directory: Path, text: LazyModelText, max_context: int, bounds: Bounds) -> None:
        self.directory = str(directory)  # where children find the model's text
        self._text = text
        self._max_context = max_context
        self._bounds = bounds
        allowance = Allowance(
            bounds.text_seconds, bounds.text_memory_bytes, {"TOKENIZERS_PARALLELISM": "false"}
        )
        self._children = SharedChildren(allowance, CHILDREN, CHILDREN_OF_ONE)

    async def close(self) -> None:
        """End the child processes. No call may be at work."""
        await self._children.close()

    async def call_outside(self, call: OutsideCall, preparation: OutsideCall | None = None) -> Any:
        """Call a function in one of the child processes, as ``SharedChildren.call`` does."""
        ready = OutsideCall(f"{_HERE}:be_ready", {"directory": self.directory})
        return await self._children.call(call, preparation or ready)

    async def tokens(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Tokenize prompts, with the ``special_tokens`` that the tokenizer adds. Raises InvalidRequest."""
        if not texts:
            return []
        model = await self._text.get()
        if self._check_sizes(texts, model) <= SHORT_BYTES:
            return await asyncio.to_thread(tokenize, model.tokenizer, texts, special_tokens)
        return await self._outside("tokenize_outside", texts=list(texts), special_tokens=special_tokens)

    async def of_conversation(
        self, messages: Sequence[TemplateMessage], options: Mapping[str, Any]
    ) -> list[int]:
        """Tokenize what the chat template makes of a conversation; it writes all special tokens itself."""
        conversation = msgspec.json.encode((messages, options))
        self._check_total(len(conversation))
        if len(conversation) > SHORT_BYTES:
            (tokens,) = await self._outside("converse_outside", conversation=conversation.decode())
            return tokens
        most = self._bounds.prompt_text_bytes, self._bounds.text_seconds
        model = await self._text.get()
        text = await asyncio.to_thread(model.template.render, messages, options, *most)
        (tokens,) = await self.tokens([text], special_tokens=False)
        return tokens

    async def behind_turn(
        self, turns: TurnsToRender, options: Mapping[str, Any], end: TurnEnd
    ) -> TailTokens | None:
        """Tokenize what follows a sampled turn; None if the template rewrites it. Raises InvalidRequest."""
        conversation = msgspec.json.encode((turns.messages, options, turns.known, vars(end)))
        self._check_total(len(conversation))
        if len(conversation) > SHORT_BYTES:
            tokens = await self._outside("behind_turn_outside", conversation=conversation.decode())
            return TailTokens(tokens[0], bool(tokens[1][0])) if tokens else None
        model = await self._text.get()
        most = self._bounds.prompt_text_bytes, self._bounds.text_seconds
        return await asyncio.to_thread(behind_turn, model, turns, options, end, most)

    async def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence, with special tokens. Raises InvalidRequest."""
        return [text for (text,) in await self._decode(sequences, whole=True)]

    async def pieces(self, sequences: Sequence[Sequence[int]]) -> list[list[str]]:
        """Return the text of each token of each sequence. Raises InvalidRequest."""
        return await self._decode(sequences, whole=False)

    async def _decode(self, sequences: Sequence[Sequence[int]], *, whole: bool) -> list[list[str]]:
        if sum(map(len, sequences)) <= SHORT_TOKENS:
            model = await self._text.get()
            return await asyncio.to_thread(_decoded, model.tokenizer, sequences, whole)
        packed = {"directory": self.directory, "sequences": token_texts.pack(sequences), "whole": whole}
        try:
            return await self.call_outside(OutsideCall(f"{_HERE}:decode_outside", packed))
        except ForeignCodeFailed as error:
            raise InvalidRequest(
                f"{sum(map(len, sequences))} tokens could not be made into text within "
                f"{self._bounds.text_seconds:g} s and {show_size(self._bounds.text_memory_bytes)}; "
                "ask for less"
            ) from error

    def _check_sizes(self, texts: Sequence[str], model: ModelText) -> int:
        """Return the bytes of all texts. Raises InvalidRequest."""
        sizes = [_size(text, self._bounds.prompt_text_bytes) for text in texts]
        most = self._max_context * model.longest_token * (SHRINKS if model.tokenizer.normalizer else 1)
        if max(sizes) > most:
            least = -(-max(sizes) * self._max_context // most)
            raise PromptTooLong.by(
                least, self._max_context, f"{max(sizes)} bytes, which are {least} tokens at least,"
            )
        self._check_total(sum(sizes))
        return sum(sizes)

    def _check_total(self, size: int) -> None:
        most = self._bounds.prompt_text_bytes
        if size > most:
            raise InvalidRequest(
                f"the prompt is too long: its text has more than {show_size(most)}; shorten it, or send "
                "fewer prompts at once (the operator raises the limit prompt_text_bytes)"
            )

    async def _outside(self, function: str, **arguments: object) -> list[list[int]]:
        bounds = self._bounds
        arguments |= {
            "directory": self.directory,
            "most_tokens": self._max_context,
            "most_bytes": bounds.prompt_text_bytes,
            "seconds": bounds.text_seconds,
        }
        try:
            result = await self.call_outside(OutsideCall(f"{_HERE}:{function}", arguments))
        except ForeignCodeFailed as error:
            raise InvalidRequest(
                f"the text of the prompt could not be tokenized within {bounds.text_seconds:g} s "
                f"and {show_size(bounds.text_memory_bytes)}; shorten it, or send tokens"
            ) from error
        return token_texts.unpack(result)


def behind_turn(
    model: ModelText,
    turns: TurnsToRender,
    options: Mapping[str, Any],
    end: TurnEnd,
    limits: tuple[int, float],
) -> TailTokens | None:
    """Render and tokenize what follows a sampled turn, within so many characters and seconds. Blocks."""
    parts = model.template.render_parts(turns.messages, turns.known, options, *limits)
    found = continuation.tail(parts, end)
    if found is None:
        return None
    (tokens,) = tokenize(model.tokenizer, [found.text], False)
    return TailTokens(tokens, found.drops_stop)


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
    """Tokenize texts. Blocks, but lets other threads run, which ``Tokenizer.encode`` does not."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
    return [encoding.ids for encoding in encodings]


@functools.cache
def lasting_model_text(directory: str) -> ModelText:
    """Load the model's text once in a child process that lasts."""
    return load_model_text(Path(directory))


def be_ready(directory: str) -> None:
    """Load what the next call needs, in a child process."""
    lasting_model_text(directory)


def tokenize_outside(
    directory: str, texts: list[str], most_tokens: int, special_tokens: bool = True, **_: object
) -> list[bytes]:
    """Tokenize texts in a child process; returns the tokens of each, int32."""
    tokenizer = lasting_model_text(directory).tokenizer
    packed = list[bytes]()
    for text in texts:
        (tokens,) = tokenize(tokenizer, [text], special_tokens)
        if len(tokens) > most_tokens:
            raise PromptTooLong.by(len(tokens), most_tokens)
        packed += token_texts.pack([tokens])
    return packed


def decode_outside(directory: str, sequences: list[bytes], whole: bool) -> list[list[str]]:
    """Make tokens into text in a child process."""
    return _decoded(lasting_model_text(directory).tokenizer, token_texts.unpack(sequences), whole)


def _decoded(tokenizer: Tokenizer, sequences: Sequence[Sequence[int]], whole: bool) -> list[list[str]]:
    if whole:
        return [[text] for text in token_texts.texts(tokenizer, sequences)]
    return [token_texts.pieces(tokenizer, tokens) for tokens in sequences]


def converse_outside(
    directory: str, conversation: str, most_tokens: int, most_bytes: int, seconds: float
) -> list[bytes]:
    """Render and tokenize a conversation in a child process; returns its tokens, int32."""
    messages, options = msgspec.json.decode(conversation)
    text = lasting_model_text(directory).template.render(messages, options, most_bytes, seconds)
    return tokenize_outside(directory, [text], most_tokens, special_tokens=False)


def behind_turn_outside(
    directory: str, conversation: str, most_tokens: int, most_bytes: int, seconds: float
) -> list[bytes]:
    """Do ``behind_turn`` in a child process; returns tokens and whether the stop is dropped, or nothing."""
    messages, options, known, ending = msgspec.json.decode(conversation)
    turns, end = TurnsToRender(messages, known), msgspec.convert(ending, TurnEnd)
    found = behind_turn(lasting_model_text(directory), turns, options, end, (most_bytes, seconds))
    if found is None:
        return []
    if len(found.tokens) > most_tokens:
        raise PromptTooLong.by(len(found.tokens), most_tokens)
    return token_texts.pack([found.tokens, [int(found.drops_stop)]])


def _size(text: str, enough: int) -> int:
    """Bytes of the text in UTF-8; if it is too long anyway, its characters."""
    return len(text) if len(text) > enough else len(text.encode(errors="replace"))
