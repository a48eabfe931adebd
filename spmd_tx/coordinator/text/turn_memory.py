"""Remembers sampled turns of all callers within a number of bytes, for conversations that go on from them."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from spmd_tx.coordinator.conversation.messages import ASSISTANT, Message
from spmd_tx.coordinator.conversation.turn_tree import TurnTree
from spmd_tx.coordinator.conversation.turns import SampledTurn, message_keys

SHARE = 8  # a conversation may take this part of the memory
MOST_TURNS = 1024  # of a conversation; a fresh tree replaces a fuller one


class TurnMemory:
    """Holds a tree of turns for each beginning of a conversation. The least recently used ones go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity  # bytes
        self.size = 0
        self._trees: OrderedDict[str, TurnTree] = OrderedDict()

    def tree(self, owner: str, base: str, messages: Sequence[Message]) -> TurnTree:
        """Return the tree of the conversations of an owner with a model that begin with these messages.

        Blocks for some milliseconds where they are long.
        """
        keys = message_keys([*takewhile(lambda message: message.role != ASSISTANT, messages)])
        name = f"{owner}\n{base}\n{keys[-1].digest.hex() if keys else ''}"
        return self._trees.get(name) or TurnTree(name)

    def find(self, owner: str, turn_id: str) -> SampledTurn | None:
        """Return a turn of an owner, if it is still there."""
        beginning = f"{owner}\n"
        trees = (tree for name, tree in self._trees.items() if name.startswith(beginning))
        return next((tree.turns[turn_id] for tree in trees if turn_id in tree.turns), None)

    def add(self, tree: TurnTree, turn: SampledTurn) -> None:
        """Add a turn to a tree that ``tree`` has returned."""
        if len(tree.turns) >= MOST_TURNS or tree.size > self._capacity // SHARE:
            self._drop(tree.name)
            return
        before = self._trees.get(tree.name)
        if before is not None and before is not tree:  # two first turns at the same time
            tree = before
        size = tree.size if before is not None else 0
        tree.add(turn)
        self._trees[tree.name] = tree
        self._trees.move_to_end(tree.name)
        self.size += tree.size - size
        while self.size > self._capacity:
            self._drop(next(iter(self._trees)))

    def _drop(self, name: str) -> None:
        tree = self._trees.pop(name, None)
        if tree is not None:
            self.size -= tree.size
