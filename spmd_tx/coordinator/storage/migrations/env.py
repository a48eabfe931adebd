"""How Alembic reaches the database: over the connection that database.py has opened."""

from alembic import context

from spmd_tx.coordinator.storage.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite alters a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
