"""Reads what a model's directory says about text, with transformers: tokenizer, chat template, end of text.

Importing transformers takes a second or so; it happens only here, when the first model is read.
"""

import asyncio
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer

from spmd_tx.coordinator.agent.layout import TOKENIZERS
from spmd_tx.coordinator.text.chat_template import ChatTemplate
from spmd_tx.coordinator.text.end_of_text import read_eos_token_ids
from spmd_tx.coordinator.text.image_pads import PAD
from spmd_tx.coordinator.text.rank_vocabularies import (
    TEKKEN,
    TIKTOKEN,
    RankVocabulary,
    read_tekken,
    read_tiktoken,
)
from spmd_tx.coordinator.text.reply_formats import ReplyFormat, find_format
from spmd_tx.coordinator.text.template_probe import TemplateTraits, probe
from spmd_tx.errors import StartError

RANK_FILES = {TEKKEN: read_tekken, TIKTOKEN: read_tiktoken}
_importing = threading.Lock()
PROCESSOR_TEMPLATE = "chat_template.json"  # of models that see images; their text may come with it, too


@dataclass(frozen=True)
class ModelText:
    """Holds what is needed to go from text to tokens and back."""

    tokenizer: Tokenizer
    template: ChatTemplate
    eos_token_ids: tuple[int, ...] = ()  # what ends a sample when the request names no stop

    @functools.cached_property
    def longest_token(self) -> int:
        """The most bytes of text that one token stands for."""
        return max(len(text.encode()) for text in self.tokenizer.get_vocab(with_added_tokens=True))

    @property
    def image_pad(self) -> int | None:
        """The token that a chat template writes for an image; None: the vocabulary has none."""
        return self.tokenizer.token_to_id(PAD)

    @functools.cached_property
    def reply_format(self) -> ReplyFormat | None:
        """How the model writes reasoning and tool calls; None if it is not known."""
        added = {token: each.content for token, each in self.tokenizer.get_added_tokens_decoder().items()}
        found = find_format(self.template.source, list(added.values()))
        if found is None:
            return None
        ends = [added[token] for token in self.eos_token_ids if token in added]
        return replace(found, ends=tuple(dict.fromkeys([*found.ends, *ends])))

    @functools.cached_property
    def turn_ends(self) -> dict[int, str]:
        """The special tokens that end a turn, with their texts."""
        added = {token: each.content for token, each in self.tokenizer.get_added_tokens_decoder().items()}
        known = () if self.reply_format is None else self.reply_format.ends
        return {token: text for token, text in added.items() if text in known or token in self.eos_token_ids}

    @functools.cached_property
    def template_traits(self) -> TemplateTraits:
        """What the chat template takes. Blocks for some 100 ms at the first time."""
        return probe(self.template)


class LazyModelText:
    """Loads the ``ModelText`` in a thread, once."""

    def __init__(self, load: Callable[[], ModelText]) -> None:
        self._load = load
        self._loading: asyncio.Task[ModelText] | None = None
        self._loaded: ModelText | None = None

    @property
    def loaded(self) -> ModelText:
        """What ``get`` has returned before."""
        assert self._loaded is not None, "the text of the model is not loaded yet"
        return self._loaded

    async def get(self) -> ModelText:
        """Wait until it is loaded. Raises StartError."""
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(self._load))
        self._loaded = loaded = await asyncio.shield(self._loading)
        return loaded

    async def run(self) -> NoReturn:
        """Load it now, and do nothing more. Raises StartError."""
        await self.get()
        while True:
            await asyncio.Event().wait()


def load_model_text(directory: Path) -> ModelText:
    """Read the files of a model. Blocks, and does not use the network. Raises StartError."""
    path = next((directory / name for name in TOKENIZERS if (directory / name).is_file()), None)
    if path is None:
        raise StartError(f"{directory} has no {TOKENIZERS[0]}; restore it from where the model came from")
    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())  # what the tokenizers library raises has no type of its own
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read {path}: {error}; restore it from where the model came from") from None
    try:
        tokenizer = _read_tokenizer(path)
        eos_token_ids = read_eos_token_ids(directory, tokenizer)
        text = ModelText(tokenizer.backend_tokenizer, ChatTemplate(tokenizer), eos_token_ids)
        _ = text.longest_token  # counted in this thread
        return text
    except StartError:
        raise
    except Exception as error:
        raise StartError(
            f"transformers cannot read tokenizer and generation config in {directory}: {error}; restore them "
            "from where the model came from"
        ) from error


def _read_tokenizer(path: Path) -> Any:
    """Return what transformers makes of the tokenizer's file, its config and its chat template."""
    directory, kind = path.parent, _import_transformers().PreTrainedTokenizerFast
    if path.name in RANK_FILES:
        kind = _made_of_ranks(kind, _read_ranks(path))
    tokenizer = kind.from_pretrained(directory, local_files_only=True)
    of_processor = directory / PROCESSOR_TEMPLATE
    if not tokenizer.chat_template and of_processor.is_file():
        tokenizer.chat_template = _template_of_processor(of_processor)
    return tokenizer


def _template_of_processor(path: Path) -> Any:
    """Return the template, or several of them by their names; the file may have them in a list."""
    read = json.loads(path.read_bytes())
    if not isinstance(read, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    template = read.get("chat_template")
    return {each["name"]: each["template"] for each in template} if isinstance(template, list) else template


def _read_ranks(path: Path) -> RankVocabulary:
    try:
        return RANK_FILES[path.name](path)
    except StartError:
        raise
    except Exception as error:  # of any type: the file may hold anything
        problem = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise StartError(
            f"cannot read {path}: {problem}; restore it from where the model came from"
        ) from error


def _made_of_ranks(kind: type[Any], vocabulary: RankVocabulary) -> type[Any]:
    """Return the class of transformers with a vocabulary in place of what it would read itself."""

    class MadeOfRanks(kind):
        @classmethod
        def convert_to_native_format(cls, **of_config: Any) -> dict[str, Any]:
            return {**vocabulary.roles, **of_config, "tokenizer_object": vocabulary.tokenizer}

    return MadeOfRanks


def _import_transformers() -> Any:
    """Return the package. Two threads that imported it at once would find it half there."""
    with _importing:
        return _imported_transformers()


@functools.cache
def _imported_transformers() -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install PyTorch
    with _without("torch"):
        import transformers
        from transformers import PreTrainedConfig, PreTrainedTokenizerFast  # noqa: F401
        from transformers.utils import logging
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()  # it remembers the answer
    logging.set_verbosity_error()
    return transformers


@contextmanager
def _without(package: str) -> Iterator[None]:
    """Hide a package that is installed but not imported: transformers would import it for nothing."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # pyright: ignore[reportArgumentType] (the import system takes it)
    try:
        yield
    finally:
        del sys.modules[package]
