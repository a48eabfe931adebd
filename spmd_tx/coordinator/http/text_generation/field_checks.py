"""Refuses fields of a body that would be ignored otherwise, but for those without effect. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from spmd_tx.coordinator.conversation.messages import shown
from spmd_tx.errors import WrongField

UNKNOWN, NOT_OFFERED, OTHER_VALUE = "unknown_parameter", "unsupported_parameter", "unsupported_value"
MOST_SHOWN = 80  # characters of the name of an unknown field


@dataclass(frozen=True)
class HarmlessFields:
    """Lists the fields of a request that have no effect."""

    labels: frozenset[str]  # whatever their value
    defaults: Mapping[str, tuple[Any, ...]]  # with a value that asks for what happens anyway; none: never
    remedies: Mapping[str, str]  # what to do instead
    hint: str = ""  # what else to do with fields that are not known

    def check(self, body: bytes | Raw, served: type[msgspec.Struct], within: str = "") -> None:
        """Refuse any other field of a body, or of the object ``within`` it. Raises WrongField."""
        for key, value in msgspec.json.decode(body, type=dict[str, Raw]).items():
            name = f"{within}{key}"
            if key not in served.__struct_fields__ and name not in self.labels and bytes(value) != b"null":
                self._check(name, value, "" if within else self.hint)

    def _check(self, name: str, value: Raw, hint: str) -> None:
        remedy, shown = self.remedies.get(name, "leave it out"), name[:MOST_SHOWN]
        if name not in self.defaults:
            remedy = f"{remedy}; {hint}" if hint and name not in self.remedies else remedy
            raise WrongField(f"{shown} is not known to this server; {remedy}", shown, UNKNOWN)
        harmless = self.defaults[name]
        if msgspec.json.decode(value) not in harmless:
            code = OTHER_VALUE if harmless else NOT_OFFERED
            raise WrongField(f"{name} is not offered by this server; {remedy}", name, code)


def check_text(value: Mapping[str, Any] | None, name: str, key: str) -> None:
    """Refuse a key of an object in a request that is neither text nor null. Raises WrongField."""
    given = (value or {}).get(key)
    if not isinstance(given, str | None):
        raise WrongField(f"{name}.{key} is {shown(given)}; send a text, or leave it out", f"{name}.{key}")


def check_keys(value: Mapping[str, Any] | None, name: str, known: frozenset[str]) -> None:
    """Refuse keys of an object in a request, unless they are known or null. Raises WrongField."""
    for key, given in (value or {}).items():
        if key not in known and given is not None:
            wrong = f"{name}.{key:.80}"
            raise WrongField(f"{wrong} is not offered by this server; leave it out", wrong)
