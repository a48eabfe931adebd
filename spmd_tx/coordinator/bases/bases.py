"""Finds base models by the names that clients, rows and manifests have for them."""

from collections.abc import Sequence
from typing import NamedTuple

from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.catalog.served_names import VARIANT
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest, StartError


class AskedBase(NamedTuple):
    """Holds a base, and its name in the answers to a client that asked for it by some name."""

    base: ServedBase
    name: str  # with ":peft:N", if that was asked for


class Bases:
    """Holds the base models of a server. No two have a name in common."""

    def __init__(self, bases: Sequence[ServedBase]) -> None:
        """The first one is meant where none is named. Raises StartError for a name of two."""
        self._of_name: dict[str, ServedBase] = {}
        for base in bases:
            for name in base.names.names:
                if name in self._of_name:
                    both = f"{self._of_name[name].model.directory}, {base.model.directory}"
                    raise StartError(f"two bases are called {name} ({both}); change served_model_name of one")
                self._of_name[name] = base
        self.all = tuple(bases)
        earlier = {name: base for base in reversed(bases) for name in base.history.names}
        self._of_any_name = earlier | self._of_name

    @property
    def default(self) -> ServedBase:
        return self.all[0]

    def find(self, name: str) -> AskedBase | None:
        """Return the base that a client means by a name, also by "NAME:peft:N"; None: there is none.

        Raises InvalidRequest if N is above the context.
        """
        for base in self.all:
            if (served_name := base.names.find(name)) is not None:
                return AskedBase(base, served_name)
        return None

    def need(self, name: str) -> AskedBase:
        """Return the base that a client means by a name. Raises InvalidRequest if there is none."""
        found = self.find(name)
        if found is None:
            served = " and ".join(map(repr, self._of_name))
            raise InvalidRequest(f"base_model is {name!r}; this server serves {served} only")
        return found

    def need_to_train(self, name: str) -> AskedBase:
        """Do so for a model that is to be created. Raises InvalidRequest, also if the base is not trained."""
        found = self.need(name)
        if not found.base.is_trainable:
            trained = ", ".join(base.name for base in self.all if base.is_trainable) or "none"
            raise InvalidRequest(
                f"{found.base.name} is only sampled from here; models that can be trained: {trained}"
            )
        return found

    def of_row(self, name: str) -> ServedBase:
        """Return the base of a model or sampler, whose row has a name as clients saw it at that time.

        A name that none is known to have had is one of the first base's, from before names were recorded.
        """
        variant = VARIANT.fullmatch(name)
        return self._of_any_name.get(name if variant is None else variant["model"], self.default)

    def of_checkpoint(self, path: CheckpointPath, manifest: Manifest) -> ServedBase:
        """Return the base of a checkpoint. Raises InvalidRequest if the server does not have it."""
        base = self._of_any_name.get(manifest.base_model)
        if base is None:
            served = " and ".join(repr(base.name) for base in self.all)
            raise InvalidRequest(
                f"checkpoint {path} was trained on {manifest.base_model!r}, and this server serves {served}; "
                "use a checkpoint of this model"
            )
        return base


def check_same_base(path: CheckpointPath, base: ServedBase, wanted: AskedBase | None) -> None:
    """Raise InvalidRequest if a client wants a checkpoint of this base as one of another; None: of any."""
    if wanted is not None and wanted.base is not base:
        raise InvalidRequest(
            f"checkpoint {path} was trained on {base.name!r}, and base_model is {wanted.name!r}; leave "
            "base_model out, or use a checkpoint of that base model"
        )
