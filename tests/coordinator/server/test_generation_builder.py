import pytest
from sqlalchemy import delete

from spmd_tx.coordinator.server.generation_builder import next_generation
from spmd_tx.coordinator.storage.tables import ServerState
from spmd_tx.errors import DatabaseDamaged


async def test_each_generation_has_a_number_of_its_own(database):
    async with database.transaction() as db:
        await db.merge(ServerState(id=1, generation=3))
    first = await next_generation(database)
    assert await next_generation(database) == first + 1


async def test_a_lost_counter_is_told_and_not_waited_for(database):
    async with database.transaction() as db:
        await db.execute(delete(ServerState))
    with pytest.raises(DatabaseDamaged, match="restore the database from a backup"):
        await next_generation(database)
