"""The number of the generation of workers, which grows as long as the database lives."""

from sqlalchemy import update

from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.outages import patiently
from spmd_tx.coordinator.storage.tables import ServerState


async def next_generation(database: Database) -> int:
    """A number that no generation has had, so that messages of older ones are told apart."""
    count = (
        update(ServerState).values(generation=ServerState.generation + 1).returning(ServerState.generation)
    )

    async def counted() -> int:
        async with database.transaction() as db:
            return (await db.execute(count)).scalar_one()

    return await patiently(counted)
