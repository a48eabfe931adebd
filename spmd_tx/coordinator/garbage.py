"""``spmd-tx gc``: what a server does from time to time, done while none runs, or only told."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.reaper import Limits, Reaped, Reaper
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.errors import StartError


async def collect(data_dir: Path, database_url: str | None, limits: Limits, dry_run: bool) -> list[Reaped]:
    """Take database and directory as a server does, and reap. Raises StartError when a server has them."""
    if not data_dir.is_dir():
        raise StartError(f"--data-dir {data_dir} does not exist")
    database = await open_database(database_url, data_dir)
    try:
        files = await asyncio.to_thread(PayloadFiles, data_dir / "payloads")
        try:
            reaper = Reaper(database, data_dir.absolute(), limits)
            # Who asks for it looks at what goes (--dry-run): the clock is believed.
            return await reaper.reap(clock.now(), at_rest=True, dry_run=dry_run)
        finally:
            files.close()
    finally:
        await database.close()


def table(reaped: Sequence[Reaped]) -> str:
    """Kind, count and bytes in columns, with the sum."""
    rows = [("", "count", "size")]
    rows += [(each.kind, str(each.count), show_size(each.size) if each.size else "") for each in reaped]
    rows.append(("in all", "", show_size(sum(each.size for each in reaped))))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{kind:<{widths[0]}}  {count:>{widths[1]}}  {size:>{widths[2]}}" for kind, count, size in rows
    )
