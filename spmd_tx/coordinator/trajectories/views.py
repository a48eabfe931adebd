"""Describes trajectories and their turns for clients."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.conversation.messages import Message
from spmd_tx.coordinator.storage.tables import TrajectoryRow, TurnRow
from spmd_tx.coordinator.text.model_text import ModelText
from spmd_tx.coordinator.text.token_texts import pieces
from spmd_tx.coordinator.trajectories import catalog
from spmd_tx.coordinator.trajectories.catalog import TrajectoryCounts
from spmd_tx.coordinator.trajectories.records import TurnPrompt, decode, decode_conversation
from spmd_tx.coordinator.trajectories.trees import TurnOfRow, read_row
from spmd_tx.coordinator.wire.trajectories import TrajectoryEntry, TurnCall, TurnEntry, TurnMessage


async def entries(db: AsyncSession, rows: Sequence[TrajectoryRow]) -> list[TrajectoryEntry]:
    """Describe trajectories."""
    ids = [row.id for row in rows]
    counts, newest = await catalog.counts(db, ids), await catalog.newest_turns(db, ids)
    return [_entry(row, counts.get(row.id, TrajectoryCounts()), newest.get(row.id)) for row in rows]


def _entry(
    row: TrajectoryRow, counts: TrajectoryCounts, newest: tuple[str, str | None] | None
) -> TrajectoryEntry:
    model, weights = newest or (None, None)
    return TrajectoryEntry(
        id=row.id,
        name=row.name,
        owner=row.owner,
        state="open" if row.finished_at is None else "finished",
        created_at=_moment(row.created_at),
        used_at=_moment(row.used_at),
        model=row.model or model,
        weights=weights,
        **counts._asdict(),
        size_bytes=row.size_bytes,
        reward=row.reward,
        metrics=row.metrics,
        user_metadata=row.user_metadata,
    )


def turn_entries(
    rows: Sequence[TurnRow], texts: Mapping[str, ModelText], *, with_tokens: bool
) -> list[TurnEntry]:
    """Describe turns of a trajectory; those without samples have none of them. Blocks."""
    found = list[TurnEntry]()
    for row in rows:
        conversation = decode_conversation(decode(row.prompt, TurnPrompt).conversation)
        messages = [_message(each) for each in conversation.messages]
        model = texts.get(row.base) if with_tokens else None
        samples = read_row(row, texts)
        found += [_turn(row, each.turn.id, messages, each, model) for each in samples]
        if not samples:
            found.append(_turn(row, f"{row.request_id}:0", messages))
    return found


def outline_entries(rows: Sequence[TurnRow]) -> list[TurnEntry]:
    """Describe turns by their columns alone, without what was said.

    Of several samples of one request only the first, those with rewards and those that others go on from are
    known.
    """
    numbers = dict[str, set[str]]()  # of samples that others go on from, by request
    for row in rows:
        request_id, _, number = (row.parent or "").rpartition(":")
        numbers.setdefault(request_id, set()).add(number)
    found = list[TurnEntry]()
    for row in rows:
        known = {"0", *(row.rewards or {}), *numbers.get(row.request_id, ())}
        found += [_turn(row, f"{row.request_id}:{number}", []) for number in sorted(known, key=int)]
    return found


def _turn(
    row: TurnRow,
    id: str,
    messages: list[TurnMessage],
    sample: TurnOfRow | None = None,
    shown_by: ModelText | None = None,
) -> TurnEntry:
    given = (row.rewards or {}).get(id.rpartition(":")[2], {})
    sampled = [] if sample is None else sample.turn.sampled.tolist()
    has_tokens = shown_by is not None and sample is not None
    return TurnEntry(
        id=id,
        parent=row.parent,
        cause=row.cause,
        cause_message=row.cause_message,
        state=row.state,  # pyright: ignore[reportArgumentType] (TurnState)
        model=row.model,
        weights=row.weights,
        dialect=row.dialect,
        agent=row.agent,
        created_at=_moment(row.created_at),
        finished_at=None if row.finished_at is None else _moment(row.finished_at),
        new_messages=messages,
        reused_tokens=row.reused,
        new_tokens=row.new,
        cached_tokens=row.cached,
        sampled_tokens=row.sampled or 0 if sample is None else len(sampled),
        message=None if sample is None else _message(sample.read.message),
        status=None if sample is None else sample.read.status,
        stop_reason=None if sample is None else sample.stop_reason or None,
        reward=given.get("reward"),
        metrics=given.get("metrics"),
        tokens=pieces(shown_by.tokenizer, sampled) if shown_by is not None and has_tokens else [],
        logprobs=sample.logprobs.tolist() if sample is not None and has_tokens else [],
        forced=sample.forced.tolist() if sample is not None and has_tokens else [],
    )


def _message(message: Message) -> TurnMessage:
    calls = [TurnCall(call.name, _text(call.arguments), call.id) for call in message.calls]
    images = len(message.images)
    return TurnMessage(message.role, message.text, message.reasoning, calls, message.call_id, images)


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
