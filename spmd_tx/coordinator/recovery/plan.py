"""Plans how to restore a model: from which snapshot, and which requests after it run again.

A model's state is a pure function of its adapter's seed and its executed requests, in the order of their
seq_id. Requests that ran in other company, or in another slot, give the same bits.
"""

from collections.abc import Collection, Mapping

from spmd_tx.coordinator.checkpoints.snapshots import Snapshots, StoredSnapshot
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import ModelHistory, Request
from spmd_tx.coordinator.training.line import Restoration


async def plan(
    model_id: str,
    session_id: str,
    unfinished: Collection[Request],
    beyond_repair: Mapping[str, str],
    log: RequestQueue,
    snapshots: Snapshots,
) -> Restoration | None:
    """Read from the log how to restore a model; None for one that has not been created yet.

    ``beyond_repair`` says of requests, by id, why they cannot be run again.
    """
    first_open = min((request.seq_id for request in unfinished), default=None)
    # A snapshot behind an unanswered request would skip what the answer has to be made from.
    start, damage = await snapshots.newest(model_id, before=first_open)
    history = await log.history(model_id, after=-1 if start is None else start.seq_id)
    if not history.is_created:  # its creation may be in the log and not yet among ``unfinished``
        closed = frozenset(history.closed)  # later requests may have failed already, without waiting for it
        return Restoration(model_id, session_id, closed=closed) if closed else None
    never_again = (beyond_repair.get(each.request.id) for each in history.executed)
    refusal = (
        history.refusal or _problem(model_id, start, damage, history) or next(filter(None, never_again), None)
    )
    if refusal is not None:
        return refused(model_id, session_id, refusal, first_open, history)
    last = history.executed[-1].request.seq_id if history.executed else -1
    next_seq_id = max(last, -1 if start is None else start.seq_id) + 1
    between = [request for request in unfinished if request.seq_id < next_seq_id]
    known = [each.request for each in history.executed]
    return Restoration(
        model_id=model_id,
        session_id=session_id,
        start=start,
        again={each.request.id: each for each in history.executed},
        requests=sorted([*known, *between], key=lambda request: request.seq_id),
        next_seq_id=next_seq_id,
        closed=frozenset(seq_id for seq_id in history.closed if seq_id >= next_seq_id),
    )


def refused(
    model_id: str, session_id: str, refusal: str, first_open: int | None, history: ModelHistory
) -> Restoration:
    """Plan a model that takes its place in line, but whose requests all fail."""
    answered = history.closed | {each.request.seq_id for each in history.executed}
    next_seq_id = max(answered, default=0) + 1 if first_open is None else first_open
    return Restoration(model_id, session_id, refusal, next_seq_id=next_seq_id, closed=frozenset(answered))


def _problem(
    model_id: str, start: StoredSnapshot | None, damage: str | None, history: ModelHistory
) -> str | None:
    if start is not None:
        return None
    if damage is not None:
        return f"{model_id} cannot be restored, its snapshots are damaged: {damage}"
    if not history.executed or history.executed[0].request.seq_id != 0:
        return f"{model_id} cannot be restored: the log does not reach back to its creation"
    return None
