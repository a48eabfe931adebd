"""Finds the base model, and checks that the configuration and the data directory fit it."""

from dataclasses import dataclass
from functools import partial

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.agent.base_model import find_config, find_model, fingerprint
from spmd_tx.coordinator.bases.served_base import BaseHistory
from spmd_tx.coordinator.server.expert_lora import with_expert_lora
from spmd_tx.coordinator.server.preflight import check_mesh, context_length
from spmd_tx.coordinator.server.same_model import NumericChanges, check_same_model
from spmd_tx.coordinator.text.model_text import LazyModelText, load_model_text
from spmd_tx.coordinator.text.served_model import ServedModel
from spmd_tx.models.config import read_model_config


@dataclass(frozen=True)
class OpenedModel(ServedModel):
    """Holds what was found out about the base model at the start."""

    history: BaseHistory | None = None  # None: it has had no other name
    numbers: NumericChanges | None = None  # None: they need not be kept
    files: dict[str, str] | None = None  # fingerprints by name; None: not taken yet
    commit: str | None = None  # that --revision names; None: none is asked for


def open_model(config: ServerConfig) -> OpenedModel:
    """Find the model and check that the configuration fits it. Blocks. Raises StartError."""
    described = find_config(config.base_model, config.revision)  # no weights are downloaded for nothing
    read = read_model_config(described, expert_weights=config.expert_weights, base_dtype=config.base_dtype)
    model = with_expert_lora(config, read)
    check_mesh(config, model)
    max_context = context_length(config, model)
    directory = find_model(config.base_model, config.revision)
    files = fingerprint(directory)
    numbers = check_same_model(config, model, files)
    return OpenedModel(
        directory=directory,
        config=model,
        max_context=max_context,
        text=LazyModelText(partial(load_model_text, directory)),
        history=BaseHistory(numbers.record.key, tuple(numbers.record.names)),
        numbers=numbers,
        files=files,
        commit=None if config.revision is None else directory.name,
    )
