"""Finds the base model, and checks that the configuration and the data directory fit it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.agent.base_model import find_config, find_model, fingerprint
from spmd_tx.coordinator.bases.served_base import BaseHistory
from spmd_tx.coordinator.server.base_records import keep_records
from spmd_tx.coordinator.server.expert_lora import with_expert_lora
from spmd_tx.coordinator.server.preflight import check_mesh, check_sight, context_length
from spmd_tx.coordinator.server.same_model import NumericChanges, check_same_model
from spmd_tx.coordinator.text.model_text import LazyModelText, load_model_text
from spmd_tx.coordinator.text.served_model import ServedModel
from spmd_tx.errors import StartError, UnreadableModel
from spmd_tx.images.processor import FILES, ImageProcessor, read_processor
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.model import Model
from spmd_tx.options import AUTO

logger = logging.getLogger(__name__)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except StartError as error:
        raise UnreadableModel(str(error)) from error


@dataclass(frozen=True)
class OpenedModel(ServedModel):
    """Holds what was found out about the base model at the start."""

    history: BaseHistory | None = None  # None: it has had no other name
    numbers: NumericChanges | None = None  # None: they need not be kept
    files: dict[str, str] | None = None  # fingerprints by name; None: not taken yet
    commit: str | None = None  # that --revision names; None: none is asked for


def open_models(config: ServerConfig) -> list[OpenedModel | UnreadableModel]:
    """Find the models of all groups, in their order; of one that cannot be read, return why. Blocks.

    Raises StartError if a configuration does not fit its model, and if no model can be read.
    """
    if config.groups:
        keep_records(config)
    found = dict[tuple[str, ...], OpenedModel | UnreadableModel]()  # groups of one base model share it
    for group in config.all_groups:
        if group.model_names not in found:
            try:
                found[group.model_names] = open_model(group)
            except UnreadableModel as problem:
                found[group.model_names] = problem
        elif isinstance(known := found[group.model_names], OpenedModel):
            check_mesh(group, known.config)
    problems = [each for each in found.values() if isinstance(each, UnreadableModel)]
    if len(problems) == len(found):
        raise problems[0]
    return [found[group.model_names] for group in config.all_groups]


def _processor(config: ServerConfig, model: Model, directory: Path) -> ImageProcessor | None:
    """Return how images are prepared; None: text alone is taken. Raises StartError.

    A model that could see is served without, and with a warning, if nobody has asked for images.
    """
    if model.tower is None or config.image_tokens == 0:
        return None
    try:
        path = next((path for name in FILES if (path := directory / name).is_file()), None)
        if path is None:
            raise StartError(
                f"{directory} has no {FILES[0]}, which says how images are prepared; fetch the model again, "
                "with it"
            )
        return read_processor(path.read_bytes(), str(path))
    except StartError as problem:
        if config.image_tokens != AUTO:
            raise
        logger.warning("%s takes text alone: %s", config.base_model, problem)
        return None


def open_model(config: ServerConfig) -> OpenedModel:
    """Find the model and check that the configuration fits it. Blocks.

    Raises StartError, which is an UnreadableModel if the model is the problem.
    """
    with _reading():  # no weights are downloaded for nothing
        described = find_config(config.base_model, config.revision)
        read = read_model_config(
            described,
            expert_weights=config.expert_weights,
            base_dtype=config.base_dtype,
            speculation=config.speculation,
        )
    model = with_expert_lora(config, read)
    check_mesh(config, model)
    check_sight(config, model)
    max_context = context_length(config, model)
    with _reading():
        directory = find_model(config.base_model, config.revision)
        files = fingerprint(directory)
        images = _processor(config, model, directory)
    numbers = check_same_model(config, model, files)
    return OpenedModel(
        directory=directory,
        config=model,
        max_context=max_context,
        text=LazyModelText(partial(load_model_text, directory)),
        images=images,
        history=BaseHistory(numbers.record.key, tuple(numbers.record.names)),
        numbers=numbers,
        files=files,
        commit=None if config.revision is None else directory.name,
    )
