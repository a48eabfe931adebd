"""How much was trained, sampled and saved: added up by the hour, for each model and sampler."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import CursorResult, delete, insert, update
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator import checkpoint_files
from spmd_tx.coordinator.tables import Model, Sampler, Session, UsageRow

HOUR_SECONDS = 3600
KEPT_SECONDS = 400 * 24 * 3600.0  # a year, and some days to look at it


class Spent(NamedTuple):
    """What a request was worth. Counted once, when its result is stored: a replay adds nothing."""

    trained: int = 0  # tokens through forward_backward
    forwarded: int = 0  # tokens through forward
    prompt: int = 0  # tokens; the samples of one request share its prompt
    cached: int = 0  # of the prompt's, those that were found in the cache
    sampled: int = 0  # tokens
    checkpoints: int = 0  # saved under a name

    @property
    def tokens(self) -> int:
        return self.trained + self.forwarded + self.prompt + self.sampled


NOTHING = Spent()


class Item(NamedTuple):
    """What a request of a model or sampler has spent."""

    line: str
    session_id: str
    spent: Spent


async def add(db: AsyncSession, items: Iterable[Item], now: float) -> None:
    """Count requests towards the hour of ``now``."""
    hour = int(now) // HOUR_SECONDS * HOUR_SECONDS
    sums: dict[tuple[str, str], Spent] = defaultdict(Spent)
    for line, session_id, spent in items:
        if spent != NOTHING:
            known = sums[line, session_id]
            sums[line, session_id] = Spent(*map(sum, zip(known, spent, strict=True)))
    for (line, session_id), spent in sums.items():
        more = {name: getattr(UsageRow, name) + value for name, value in spent._asdict().items()}
        is_known = (UsageRow.hour == hour, UsageRow.line == line)
        changed = await db.execute(update(UsageRow).where(*is_known).values(more))
        assert isinstance(changed, CursorResult)
        if changed.rowcount == 0:
            whose = await _whose(db, line, session_id)
            await db.execute(insert(UsageRow).values(hour=hour, line=line, **whose, **spent._asdict()))


async def forget(db: AsyncSession, now: float) -> None:
    await db.execute(delete(UsageRow).where(UsageRow.hour < now - KEPT_SECONDS))


async def _whose(db: AsyncSession, line: str, session_id: str) -> dict[str, str | None]:
    """The columns that a line's first usage in an hour brings with it."""
    session = await db.get(Session, session_id)
    model = await db.get(Sampler, line) or await db.get(Model, line)
    return {
        "session_id": session_id,
        "owner": "" if session is None else session.owner,
        "key_id": session and session.key_id,
        "run_id": _run_of(model) if isinstance(model, Sampler) else line,
        "base_model": model and model.base_model,
    }


def _run_of(sampler: Sampler) -> str | None:
    if sampler.model_path is not None:
        return checkpoint_files.parse(sampler.model_path).run_id
    return sampler.model_id
