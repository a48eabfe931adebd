"""Reads the rows of a query piece by piece, so that they neither fill the memory nor hold up the loop."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVarTuple

from sqlalchemy import Row, Select
from sqlalchemy.ext.asyncio import AsyncSession

Columns = TypeVarTuple("Columns")

FIRST_ROWS, MOST_ROWS = 16, 400  # of a piece: large rows may follow small ones
PIECE_BYTES = 1 << 20  # that a piece should have


async def in_pieces(
    db: AsyncSession, query: "Select[*Columns]", rows: int
) -> "AsyncGenerator[Sequence[Row[*Columns]]]":
    """Yield so many rows at a time. Other queries of the session may run in between."""
    result = await db.stream(query)
    try:
        while piece := await result.fetchmany(rows):
            yield piece
    finally:
        await result.close()


async def sized_pieces(
    db: AsyncSession, query: "Select[*Columns]", size_of: "Callable[[Row[*Columns]], int]"
) -> "AsyncGenerator[Sequence[Row[*Columns]]]":
    """Yield as many rows at a time as have PIECE_BYTES, judged by the piece before."""
    result = await db.stream(query)
    try:
        rows = FIRST_ROWS
        while piece := await result.fetchmany(rows):
            yield piece
            size = sum(map(size_of, piece))
            rows = min(max(1, PIECE_BYTES * len(piece) // max(1, size)), MOST_ROWS)
    finally:
        await result.close()
