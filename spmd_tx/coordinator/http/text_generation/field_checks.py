"""Refuses fields of a body that would be ignored otherwise, but for those without effect. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from spmd_tx.errors import WrongField

UNKNOWN, NOT_OFFERED, OTHER_VALUE = "unknown_parameter", "unsupported_parameter", "unsupported_value"
MOST_SHOWN = 80  # characters of the name of an unknown field


@dataclass(frozen=True)
class HarmlessFields:
    """Lists the fields of a request that have no effect."""

    labels: frozenset[str]  # whatever their value
    defaults: Mapping[str, tuple[Any, ...]]  # with a value that asks for what happens anyway; none: never
    remedies: Mapping[str, str]  # what to do instead

    def check(self, body: bytes, served: type[msgspec.Struct]) -> None:
        """Refuse any other field of a body. Raises WrongField."""
        for name, value in msgspec.json.decode(body, type=dict[str, Raw]).items():
            if name not in served.__struct_fields__ and name not in self.labels and bytes(value) != b"null":
                self._check(name, value)

    def _check(self, name: str, value: Raw) -> None:
        remedy, shown = self.remedies.get(name, "leave it out"), name[:MOST_SHOWN]
        if name not in self.defaults:
            raise WrongField(f"{shown} is not known to this server; {remedy}", shown, UNKNOWN)
        harmless = self.defaults[name]
        if msgspec.json.decode(value) not in harmless:
            code = OTHER_VALUE if harmless else NOT_OFFERED
            raise WrongField(f"{name} is not offered by this server; {remedy}", name, code)
