"""Says which modules an adapter_config.json gives factors to, as PEFT selects them. No JAX."""

import re
from collections.abc import Callable, Sequence

from spmd_tx.models.adapter_formats.patterns import Pattern

ALL = "all-linear"
# PEFT takes the first number behind a name for that of the layer.
NUMBERED = re.compile(r"(?:^|.*?\.)(?P<list>[^.]+)\.(?P<number>\d+)\.")


class Selection:
    """Says whether a module is selected."""

    def __init__(
        self,
        targets: Sequence[str] | str | None,
        parameters: Sequence[str] | None,
        excluded: Sequence[str] | str | None,
        layers: Sequence[int] | int | None,
        lists: Sequence[str] | str | None,
    ) -> None:
        """Raise InvalidRequest for a pattern that is not read."""
        has_all = targets is None or ALL in ([targets] if isinstance(targets, str) else targets)
        self._targets = None if has_all or targets is None else _matcher(targets)
        self._parameters = _matcher([each.removesuffix(".weight") for each in parameters or ()])
        self._excluded = _matcher(excluded) if excluded else None
        is_pattern = isinstance(targets, str) and not has_all  # which says it all
        has_layers = layers not in (None, []) and not is_pattern
        self._layers = None if not has_layers else {layers} if isinstance(layers, int) else {*(layers or ())}
        self._entries: dict[tuple[str, ...], str | None] = {}  # for modules of the base model, by their names
        self._lists = {lists} if isinstance(lists, str) else {*(lists or ())}

    def left_out_by(self, names: tuple[str, ...], *, is_alike: bool = True) -> str | None:
        """Return the field that gives a module no factors; None: it is selected. It may have several names.

        Without ``is_alike`` the file stores the module under a name that is none of the base model's, of
        which the layer alone counts.
        """
        if not is_alike:
            return self._layer_left_out_by(names)
        if names not in self._entries:
            self._entries[names] = self._left_out_by(names)
        return self._entries[names]

    def _left_out_by(self, names: tuple[str, ...]) -> str | None:
        if any(map(self._parameters, names)):
            return None
        if self._excluded and any(map(self._excluded, names)):
            return "exclude_modules"
        if self._targets and not any(map(self._targets, names)):
            return "target_modules"
        return self._layer_left_out_by(names)

    def _layer_left_out_by(self, names: tuple[str, ...]) -> str | None:
        if self._layers is not None and not any(map(self._is_in_layers, names)):
            return "layers_to_transform"
        return None

    def _is_in_layers(self, name: str) -> bool:
        assert self._layers is not None
        for number in NUMBERED.finditer(name):
            if not self._lists or number["list"] in self._lists:
                return int(number["number"]) in self._layers
        return False


def _matcher(chosen: Sequence[str] | str) -> Callable[[str], bool]:
    if isinstance(chosen, str):
        return Pattern(chosen).matches
    names = {*chosen}
    return lambda name: any(ending in names for ending in endings(name))


def endings(name: str) -> list[str]:
    """Return a name and what follows each of its dots."""
    parts = name.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]
