"""Holds arrays, or what stands for them, by the names under which they were declared."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax

Leaf = TypeVar("Leaf")


@jax.tree_util.register_pytree_with_keys_class
class Named(Generic[Leaf]):
    """Holds leaves in the order of their declaration; ``named.q`` and ``named["q"]`` are the same."""

    __slots__ = ("_leaves",)

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        self._leaves = dict(leaves)

    def __getitem__(self, name: str) -> Leaf:
        return self._leaves[name]

    def __getattr__(self, name: str) -> Leaf:
        if name.startswith("_") or name not in self._leaves:
            raise AttributeError(name)
        return self._leaves[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self._leaves == other._leaves  # pyright: ignore[reportUnknownMemberType]

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __contains__(self, name: str) -> bool:
        return name in self._leaves

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def part(self, prefix: str) -> "Named[Leaf]":
        """Return the leaves whose names begin with the prefix, without it."""
        found = self._leaves.items()
        return Named({name[len(prefix) :]: leaf for name, leaf in found if name.startswith(prefix)})

    def without(self, names: Iterable[str]) -> "Named[Leaf]":
        """Return the leaves that have none of these names."""
        left_out = set(names)
        return Named({name: leaf for name, leaf in self._leaves.items() if name not in left_out})

    def with_(self, more: Mapping[str, Leaf]) -> "Named[Leaf]":
        """Return these leaves and more."""
        return Named({**self._leaves, **more})

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Leaf]], tuple[str, ...]]:
        keyed = [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in self._leaves.items()]
        return keyed, tuple(self._leaves)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], leaves: Iterable[Leaf]) -> "Named[Leaf]":
        return cls(dict(zip(names, leaves, strict=True)))
