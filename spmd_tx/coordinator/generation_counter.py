"""The number of the generation of workers, which grows as long as the database lives."""

import asyncio
import logging

from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError

from spmd_tx.coordinator.database import Database
from spmd_tx.coordinator.tables import ServerState

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0


async def next_generation(database: Database) -> int:
    """A number that no generation has had, so that messages of older ones are told apart."""
    count = (
        update(ServerState).values(generation=ServerState.generation + 1).returning(ServerState.generation)
    )
    while True:
        try:
            async with database.transaction() as db:
                return (await db.execute(count)).scalar_one()
        except (OSError, SQLAlchemyError) as problem:  # it may be back in a moment
            logger.error("cannot count the generation of workers: %s", problem)
            await asyncio.sleep(AGAIN_SECONDS)
