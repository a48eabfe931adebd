"""Frozen dataclasses whose fields are the branches of a pytree."""

import dataclasses
from typing import Any, Self, dataclass_transform

import jax

STATIC = "static"


def static(**options: Any) -> Any:
    """Return a field of the tree's structure, and so of the program. Options are those of ``field``."""
    return dataclasses.field(**options, metadata={STATIC: True})


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
class TreeNode:
    """Makes each subclass a frozen dataclass and a node of pytrees; ``frozen=False`` leaves it mutable."""

    def __init_subclass__(cls, *, frozen: bool = True, **options: Any) -> None:
        super().__init_subclass__(**options)
        node: Any = dataclasses.dataclass(frozen=frozen)(cls)
        fields = dataclasses.fields(node)
        jax.tree_util.register_dataclass(
            cls,
            data_fields=[field.name for field in fields if STATIC not in field.metadata],
            meta_fields=[field.name for field in fields if STATIC in field.metadata],
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values in some fields."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]
