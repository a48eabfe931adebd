"""Tools that a model may call. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """Describes a function of the client."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # the JSON schema of its arguments
