"""From the text of prompts to tokens, whatever its size: short texts in a thread, others in a child process.

A text may be as large as a body, and a token of memory and time is spent on every one or two bytes of it.
So texts are measured in bytes first, and what takes long has limits on both.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from spmd_tx.bounds import Bounds
from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.text.chat_template import ChatTemplate, Message, read_chat_template
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest
from spmd_tx.processes.child import Allowance, call_outside

SHORT_BYTES = 64 << 10  # which take some 50 ms
CHILDREN = 2  # at a time
SHRINKS = 4  # a normalizer may leave a third of the bytes

_HERE = "spmd_tx.coordinator.text.prompt_texts"


class PromptTexts:
    """Of one model."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        max_context: int,
        bounds: Bounds,
    ) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self._template = template
        self._max_context = max_context
        self._bounds = bounds
        self._most_bytes = max_context * longest_token(tokenizer) * (SHRINKS if tokenizer.normalizer else 1)
        self._children = asyncio.Semaphore(CHILDREN)

    async def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Of prompts, as the tokenizer does it by default. Raises InvalidRequest."""
        if not texts:
            return []
        if self._check_sizes(texts) <= SHORT_BYTES:
            return await asyncio.to_thread(tokenize, self._tokenizer, texts, True)
        return await self._outside("tokenize_outside", texts=list(texts))

    async def of_conversation(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """The tokens of what the chat template makes of it; it writes all special tokens itself."""
        conversation = msgspec.json.encode((messages, options))
        self._check_total(len(conversation))
        if len(conversation) > SHORT_BYTES:
            (tokens,) = await self._outside("converse_outside", conversation=conversation.decode())
            return tokens
        most = self._bounds.prompt_text_bytes, self._bounds.text_seconds
        text = await asyncio.to_thread(self._template.render, messages, options, *most)
        if self._check_sizes([text]) <= SHORT_BYTES:
            (tokens,) = await asyncio.to_thread(tokenize, self._tokenizer, [text], False)
        else:
            (tokens,) = await self._outside("tokenize_outside", texts=[text], special_tokens=False)
        return tokens

    def _check_sizes(self, texts: Sequence[str]) -> int:
        """The bytes of all of them."""
        sizes = [_size(text, self._bounds.prompt_text_bytes) for text in texts]
        if max(sizes) > self._most_bytes:
            raise InvalidRequest(
                f"the prompt is too long: it has {max(sizes)} bytes, and the {self._max_context} tokens that "
                f"the context holds are {self._most_bytes} bytes at most; shorten it"
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
        allowance = Allowance(
            bounds.text_seconds, bounds.text_memory_bytes, {"TOKENIZERS_PARALLELISM": "false"}
        )
        arguments |= {
            "directory": str(self._directory),
            "most_tokens": self._max_context,
            "most_bytes": bounds.prompt_text_bytes,
            "seconds": bounds.text_seconds,
        }
        async with self._children:
            try:
                found = await call_outside(f"{_HERE}:{function}", arguments, allowance)
            except ForeignCodeFailed as error:
                raise InvalidRequest(
                    f"the text of the prompt could not be made into tokens within {bounds.text_seconds:g} s "
                    f"and {show_size(bounds.text_memory_bytes)}; shorten it, or send tokens"
                ) from error
        return [np.frombuffer(ids, np.int32).tolist() for ids in found]


def longest_token(tokenizer: Tokenizer) -> int:
    """The most bytes of text that one token stands for."""
    texts = [*tokenizer.get_vocab(with_added_tokens=True)]
    return max(len(text.encode()) for text in texts)


def tokenize(tokenizer: Tokenizer, texts: Sequence[str], special_tokens: bool) -> list[list[int]]:
    """Blocks, but lets other threads run, which ``Tokenizer.encode`` does not."""
    found = tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
    return [encoding.ids for encoding in found]


def tokenize_outside(
    directory: str, texts: list[str], most_tokens: int, special_tokens: bool = True, **_: object
) -> list[bytes]:
    """What a child process does: the tokens of each text, int32."""
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    found = []
    for text in texts:
        (tokens,) = tokenize(tokenizer, [text], special_tokens)
        if len(tokens) > most_tokens:
            raise InvalidRequest(
                f"the prompt is too long: it has {len(tokens)} tokens and the context holds {most_tokens}; "
                "shorten it"
            )
        found.append(np.asarray(tokens, np.int32).tobytes())
    return found


def converse_outside(
    directory: str, conversation: str, most_tokens: int, most_bytes: int, seconds: float
) -> list[bytes]:
    """What a child process does: the tokens of a conversation."""
    messages, options = msgspec.json.decode(conversation)
    text = read_chat_template(Path(directory)).render(messages, options, most_bytes, seconds)
    return tokenize_outside(directory, [text], most_tokens, special_tokens=False)


def _size(text: str, enough: int) -> int:
    """In UTF-8; of a text that is too long anyway, in characters."""
    return len(text) if len(text) > enough else len(text.encode(errors="replace"))
