"""Reads what a model's directory says about text, with transformers: tokenizer, chat template, end of text.

Importing transformers takes a second or so; it happens only here, when the first model is read.
"""

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer

from spmd_tx.coordinator.text.chat_template import ChatTemplate
from spmd_tx.errors import StartError

TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
MOST_ID = 2**31 - 1


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
    path = directory / TOKENIZER
    try:
        json.loads(path.read_text())  # what the tokenizers library raises has no type of its own
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read {path}: {error}; restore it from where the model came from") from None
    try:
        transformers = _import_transformers()
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        text = ModelText(tokenizer.backend_tokenizer, ChatTemplate(tokenizer), _eos_token_ids(directory))
        _ = text.longest_token  # counted in this thread
        return text
    except Exception as error:
        raise StartError(
            f"transformers cannot read tokenizer and generation config in {directory}: {error}; restore them "
            "from where the model came from"
        ) from error


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Read them from the generation config, or else from ``config.json``. Raises ValueError."""
    transformers = _import_transformers()
    ids = None
    if (directory / GENERATION).is_file():
        ids = transformers.GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
    if ids is None and (directory / "config.json").is_file():
        config, _ = transformers.PreTrainedConfig.get_config_dict(directory, local_files_only=True)
        ids = config.get("eos_token_id")
    if ids is None:
        return ()
    found = tuple(ids) if isinstance(ids, list) else (ids,)
    if not all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= MOST_ID for each in found
    ):
        raise ValueError(f"eos_token_id is {ids!r}, which must be the number of a token, or a list of some")
    return found


@functools.cache
def _import_transformers() -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install PyTorch
    with _without("torch"):
        import transformers
        from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast  # noqa: F401
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
