"""Writes the rows of turns: with their requests, and with the outcomes of these. SQL only."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Executable, Update, insert, select, update
from sqlalchemy.orm import Session

from spmd_tx.coordinator.conversation.turn_tree import BranchCause
from spmd_tx.coordinator.storage.tables import RequestRow, TrajectoryRow, TurnRow
from spmd_tx.coordinator.trajectories.records import samples_of

IDS_AT_ONCE = 500  # of one query


class NewTurn(NamedTuple):
    """Describes a turn whose request is about to be accepted, by the names of its columns."""

    trajectory_id: str
    session_id: str
    parent: str | None
    base: str  # key of the base model
    model: str
    weights: str | None
    dialect: str
    agent: str | None
    cause: BranchCause
    cause_message: int | None
    reused: int
    new: int
    prompt: bytes  # TurnPrompt


class OpenTurn(NamedTuple):
    """Says whose turn a request is."""

    trajectory_id: str
    owner: str


def insertion(turn: NewTurn, line: str, seq_id: int, now: float) -> list[Executable]:
    """Return the statements that store a turn together with the request in this place of a line."""
    of_request = RequestRow.line == line, RequestRow.seq_id == seq_id
    row = insert(TurnRow).values(
        request_id=select(RequestRow.id).where(*of_request).scalar_subquery(),
        number=select(RequestRow.number).where(*of_request).scalar_subquery(),
        **turn._asdict(),
        created_at=now,
        state="open",
    )
    grown = growth(turn.trajectory_id, len(turn.prompt), now)
    return [row, grown.values(turns=TrajectoryRow.turns + 1)]


def open_turns(db: Session, request_ids: Sequence[str]) -> dict[str, OpenTurn]:
    """Return which of these requests are turns without an outcome."""
    found = dict[str, OpenTurn]()
    for start in range(0, len(request_ids), IDS_AT_ONCE):
        query = (
            select(TurnRow.request_id, TurnRow.trajectory_id, TrajectoryRow.owner)
            .join(TrajectoryRow, TrajectoryRow.id == TurnRow.trajectory_id)
            .where(TurnRow.request_id.in_(request_ids[start : start + IDS_AT_ONCE]), TurnRow.state == "open")
        )
        found |= {id: OpenTurn(trajectory, owner) for id, trajectory, owner in db.execute(query)}
    return found


def settle(db: Session, request_id: str, turn: OpenTurn, at: float, body: bytes | None) -> None:
    """Store what was sampled in a turn, or that it has failed (None)."""
    values: dict[str, object] = {"state": "failed", "finished_at": at}
    size = 0
    if body is not None:
        encoded = samples_of(body)
        values |= {"state": "sampled", **encoded._asdict()}
        size = len(encoded.samples)
    db.execute(update(TurnRow).where(TurnRow.request_id == request_id).values(values))
    db.execute(growth(turn.trajectory_id, size, at))


def growth(trajectory_id: str, size: int, at: float) -> Update:
    """Return the statement that counts ``size`` more bytes of a trajectory, and its use."""
    grown = {"size_bytes": TrajectoryRow.size_bytes + size, "used_at": at}
    return update(TrajectoryRow).where(TrajectoryRow.id == trajectory_id).values(grown)
