"""What lives for one base model as clients see it."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.catalog.served_names import ServedNames, tokenizer_id
from spmd_tx.coordinator.checkpoints.checkpoint_base import CheckpointBase
from spmd_tx.coordinator.grammar.compiler import Grammars
from spmd_tx.coordinator.images.seen import RequestImages
from spmd_tx.coordinator.text.prompt_texts import PromptTexts
from spmd_tx.coordinator.text.served_model import ServedModel
from spmd_tx.coordinator.wire.limits import Limits


class BaseHistory(NamedTuple):
    """Says what a base model is called in a data directory."""

    key: str  # in rows: the first name that it was served under
    names: tuple[str, ...]  # all that it has had, in rows of models and in manifests


@dataclass(frozen=True, kw_only=True)
class ServedBase:
    """Holds a base model's names, limits and texts."""

    names: ServedNames
    history: BaseHistory
    model: ServedModel
    limits: Limits
    tokenizer_id: str  # where clients find its tokenizer
    prompt_texts: PromptTexts
    images: RequestImages | None = None  # None: it takes text alone
    is_trainable: bool = True  # whether models can be created; all bases can be sampled from

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names.names[0]

    @property
    def key(self) -> str:
        """Its name in the log."""
        return self.history.key

    @cached_property
    def checkpoints(self) -> CheckpointBase:
        names = dict.fromkeys([self.name, *self.history.names])
        return CheckpointBase(tuple(names), self.model.config)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(
            self.model.text,
            self.model.config.vocab_size,
            self.limits.bounds.grammar_bytes,
            self.prompt_texts,
        )


def open_base(
    config: ServerConfig,
    model: ServedModel,
    stack: AsyncExitStack,
    *,
    history: BaseHistory | None = None,
    images: RequestImages | None = None,
) -> ServedBase:
    """Make what lives for the base model of a configuration; the stack closes it.

    Without a ``history`` it has always been called as it is now.
    """
    prompt_texts = PromptTexts(model.directory, model.text, model.max_context, config.bounds)
    stack.push_async_callback(prompt_texts.close)
    return ServedBase(
        names=ServedNames(config.model_names, model.max_context),
        history=history or BaseHistory(config.model_name, config.model_names),
        model=model,
        limits=Limits(
            model.config.vocab_size, model.max_context, config.max_rank, config.bounds, model.images
        ),
        tokenizer_id=tokenizer_id(config.base_model, model.directory),
        prompt_texts=prompt_texts,
        images=images,
        is_trainable=config.trains,
    )
