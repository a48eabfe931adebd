from contextlib import aclosing

import pytest
from sqlalchemy import func, select

from spmd_tx.coordinator.storage import row_pieces
from spmd_tx.coordinator.storage.row_pieces import in_pieces, sized_pieces
from spmd_tx.coordinator.storage.tables import SessionRow

QUERY = select(SessionRow.id, SessionRow.display_name).order_by(SessionRow.id)


@pytest.fixture
async def names(database):
    """Of sessions, the later ones a thousand times as long."""
    names = ["x" * (10 if number < 20 else 10_000) for number in range(200)]
    async with database.transaction() as db:
        for number, name in enumerate(names):
            db.add(SessionRow(id=f"{number:03d}", created_at=0.0, tags=[], display_name=name))
    return names


async def test_all_rows_come_in_their_order_beside_other_queries(database, names):
    found = []
    async with database.reading() as db:
        async for piece in in_pieces(db, QUERY, 25):
            assert len(piece) <= 25
            assert await db.scalar(select(func.min(SessionRow.id))) == "000"
            found += [name for _, name in piece]
    assert found == names


async def test_pieces_of_large_rows_have_fewer_of_them(database, names, monkeypatch):
    monkeypatch.setattr(row_pieces, "PIECE_BYTES", 50_000)
    monkeypatch.setattr(row_pieces, "MOST_ROWS", 100)
    async with database.reading() as db:
        pieces = [len(piece) async for piece in sized_pieces(db, QUERY, lambda row: len(row[1]))]
    assert sum(pieces) == len(names)
    assert pieces[0] == row_pieces.FIRST_ROWS
    assert pieces[1] <= row_pieces.MOST_ROWS
    assert set(pieces[2:-1]) == {5}


async def test_reading_may_end_early(database, names):
    async with database.reading() as db:
        async with aclosing(in_pieces(db, QUERY, 10)) as pieces:
            async for piece in pieces:
                assert len(piece) == 10
                break
        assert await db.scalar(select(func.min(SessionRow.id))) == "000"
