"""The trees of trajectories in memory: read from the log when they are used, extended by what is sampled."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from spmd_tx.coordinator.conversation.messages import MessageImage
from spmd_tx.coordinator.conversation.turn_tree import TurnTree
from spmd_tx.coordinator.conversation.turns import SampledTurn, own_key
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import TurnRow
from spmd_tx.coordinator.text.model_text import ModelText
from spmd_tx.coordinator.text.turn_reading import ReadTurn, ReplyReading, read_turn
from spmd_tx.coordinator.trajectories import catalog
from spmd_tx.coordinator.trajectories.records import TurnPrompt, TurnSamples, decode, decode_conversation


@dataclass(frozen=True)
class TurnOfRow:
    """Holds a sample of a row, as it was read again."""

    row: TurnRow
    prompt: TurnPrompt
    read: ReadTurn
    turn: SampledTurn
    logprobs: np.ndarray
    forced: np.ndarray  # bool: tokens of which a grammar left no choice
    stop_reason: str
    pad: int | None  # the token that stands for those of images; None: the model sees none

    @property
    def images(self) -> list[MessageImage]:
        """The images of what its prompt adds to the turn before."""
        return [image for message in self.turn.asked or () for image in message.images]


@dataclass
class _Entry:
    tree: TurnTree
    open: frozenset[str]  # requests without an outcome when it was read


@dataclass
class TrajectoryTrees:
    """Keeps the trees that were used last, within a number of bytes."""

    database: Database
    capacity: int  # bytes
    _entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    _loading: dict[str, asyncio.Task[_Entry]] = field(default_factory=dict)

    async def tree(self, trajectory_id: str, texts: Mapping[str, ModelText]) -> TurnTree:
        """Return the tree of a trajectory; ``texts`` are those of the base models, by their keys."""
        entry = self._entries.get(trajectory_id)
        if entry is None or entry.open:  # an outcome may be there that no call has waited for
            loading = self._loading.get(trajectory_id)
            if loading is None:
                loading = asyncio.create_task(self._load(trajectory_id, texts))
                self._loading[trajectory_id] = loading
                loading.add_done_callback(lambda _: self._loading.pop(trajectory_id, None))
            entry = await asyncio.shield(loading)
        self._entries[trajectory_id] = entry
        self._entries.move_to_end(trajectory_id)
        self._evict()
        return entry.tree

    async def add(self, trajectory_id: str, turn: SampledTurn) -> None:
        """Add what was sampled, whose outcome is stored, to the tree if it is in memory."""
        if trajectory_id in self._loading:
            await asyncio.wait([self._loading[trajectory_id]])
        if trajectory_id in self._entries:
            self._entries[trajectory_id].tree.add(turn)

    def forget(self, trajectory_id: str) -> None:
        """Read a tree again when it is used next."""
        self._entries.pop(trajectory_id, None)

    async def _load(self, trajectory_id: str, texts: Mapping[str, ModelText]) -> _Entry:
        async with self.database.reading() as db:
            rows = await catalog.turns_of(db, trajectory_id)
        tree = TurnTree(trajectory_id)
        for each in await asyncio.to_thread(read_rows, rows, texts):
            tree.add(each.turn)
        return _Entry(tree, frozenset(row.request_id for row in rows if row.state == "open"))

    def _evict(self) -> None:
        size = sum(entry.tree.size for entry in self._entries.values())
        while size > self.capacity and len(self._entries) > 1:
            _, entry = self._entries.popitem(last=False)
            size -= entry.tree.size


def read_rows(rows: Sequence[TurnRow], texts: Mapping[str, ModelText]) -> list[TurnOfRow]:
    """Read the turns of a trajectory. Blocks. Raises DamagedBody.

    Turns of a base model that is served no more are left out, and so are those that go on from them.
    """
    found = dict[str, TurnOfRow]()
    for row in rows:
        parent = None if row.parent is None else found.get(row.parent)
        if row.samples is None or row.base not in texts or (row.parent is not None and parent is None):
            continue
        found |= {each.turn.id: each for each in read_row(row, texts, parent)}
    return list(found.values())


def read_row(
    row: TurnRow, texts: Mapping[str, ModelText], parent: TurnOfRow | None = None
) -> list[TurnOfRow]:
    """Read the samples of one row, without the turns before if no parent is given. Raises DamagedBody."""
    if row.samples is None or row.base not in texts:
        return []
    model, prompt, samples = texts[row.base], decode(row.prompt, TurnPrompt), decode(row.samples, TurnSamples)
    conversation = decode_conversation(prompt.conversation)
    reading = ReplyReading(conversation.tools, tuple(prompt.stops), prompt.begun, prompt.most_calls)
    found = list[TurnOfRow]()
    for number, stop_reason in enumerate(samples.stops):
        tokens, logprobs = samples.of_sample(number)
        id = f"{row.request_id}:{number}"
        read = read_turn(model, reading, id, tokens.tolist())
        turn = SampledTurn(
            id=id,
            parent=None if parent is None else parent.turn,
            dropped=prompt.dropped,
            prompt=np.frombuffer(prompt.tokens, "<i4"),
            sampled=tokens,
            message=read.message,
            settings=prompt.settings,
            keys=(*prompt.keys, own_key(prompt.last_key, read.message)),
            stop=read.stop,
            is_continuable=read.is_whole,
            asked=tuple(conversation.messages[int(prompt.has_own_instructions) :]),
        )
        forced = samples.forced_of(number)
        found.append(TurnOfRow(row, prompt, read, turn, logprobs, forced, stop_reason, model.image_pad))
    return found
