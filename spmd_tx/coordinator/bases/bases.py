"""Finds base models by the names that clients, rows and manifests have for them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from spmd_tx.coordinator.bases.served_base import BaseHistory, ServedBase
from spmd_tx.coordinator.catalog.served_names import VARIANT
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest, StartError, Unavailable


class AskedBase(NamedTuple):
    """Holds a base, and its name in the answers to a client that asked for it by some name."""

    base: ServedBase
    name: str  # with ":peft:N", if that was asked for


class Bases:
    """Holds the base models of a server. No two have a name in common."""

    def __init__(
        self, bases: Sequence[ServedBase], known: Sequence[BaseHistory] = (), default_name: str | None = None
    ) -> None:
        """Raises StartError for a name of two.

        ``known`` are all that the data directory has had, in that order; none: those that are served.
        ``default_name`` is meant where none is named; None: that of the first one.
        """
        self.reasons: dict[str, Callable[[], str]] = {}  # why groups have failed, by the key of the base
        self._known = tuple(known)
        self._index(bases)
        self.default_name = default_name or bases[0].name

    def add(self, base: ServedBase) -> None:
        """Serve a base whose files could not be read before."""
        self.reasons.pop(base.key, None)
        self._index([*self.all, base])

    def _index(self, bases: Sequence[ServedBase]) -> None:
        known = self._known
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
        histories = [base.history for base in bases]
        self._by_key = {base.key: base for base in bases}
        self._first_key = [*known, *histories][0].key
        # Those that are not served now, by their names
        absent = {name: each.key for each in known for name in each.names if each.key not in self._by_key}
        self._absent = {name: key for name, key in absent.items() if name not in self._of_any_name}

    @property
    def take_images(self) -> bool:
        """Whether one of them sees."""
        return any(base.limits.images is not None for base in self.all)

    @property
    def default(self) -> ServedBase:
        return self.all[0]

    def find(self, name: str) -> AskedBase | None:
        """Return the base that a client means by a name, also by "NAME:peft:N"; None: there is none.

        Raises InvalidRequest if N is above the context, and Unavailable if the base is not served now.
        """
        for base in self.all:
            if (served_name := base.names.find(name)) is not None:
                return AskedBase(base, served_name)
        if _without_variant(name) in self._absent:
            raise Unavailable(self.absence(name))
        return None

    def need(self, name: str) -> AskedBase:
        """Return the base that a client means by a name.

        Raises InvalidRequest if there is none, and Unavailable if it is not served now.
        """
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

        Raises Unavailable if it is not served now.
        """
        base = self._by_key.get(self.key_of_row(name))
        if base is None:
            raise Unavailable(self.absence(name))
        return base

    def key_of_row(self, name: str) -> str:
        """Return the key of the base of a model or sampler.

        A name that none is known to have had is one of the directory's first base, from before names were
        recorded.
        """
        name = _without_variant(name)
        base = self._of_any_name.get(name)
        return self._absent.get(name, self._first_key) if base is None else base.key

    def key_in_log(self, base: str | None) -> str:
        """Return the key of the base of a request, whose row has it; None: from before there were several."""
        return self._first_key if base is None else base

    def of_checkpoint(self, path: CheckpointPath, manifest: Manifest) -> ServedBase:
        """Return the base of a checkpoint.

        Raises InvalidRequest if the server does not have it, and Unavailable if it is not served now.
        """
        base = self._of_any_name.get(manifest.base_model)
        if base is None and manifest.base_model in self._absent:
            raise Unavailable(self.absence(manifest.base_model))
        if base is None:
            served = " and ".join(repr(base.name) for base in self.all)
            raise InvalidRequest(
                f"checkpoint {path} was trained on {manifest.base_model!r}, and this server serves {served}; "
                "use a checkpoint of this model"
            )
        return base

    def absence(self, name: str) -> str:
        """Say why a base is not served now, which has this name or key."""
        reason = self.reasons.get(self._absent.get(_without_variant(name), name))
        if reason is not None:
            return f"{name} is not served now: {reason()}; what is unfinished waits"
        return (
            f"{name} is not served now; what is unfinished waits until the server is started with this base "
            "model again"
        )


def _without_variant(name: str) -> str:
    variant = VARIANT.fullmatch(name)
    return name if variant is None else variant["model"]


def check_same_base(path: CheckpointPath, base: ServedBase, wanted: AskedBase | None) -> None:
    """Raise InvalidRequest if a client wants a checkpoint of this base as one of another; None: of any."""
    if wanted is not None and wanted.base is not base:
        raise InvalidRequest(
            f"checkpoint {path} was trained on {base.name!r}, and base_model is {wanted.name!r}; leave "
            "base_model out, or use a checkpoint of that base model"
        )
