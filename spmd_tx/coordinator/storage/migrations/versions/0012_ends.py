"""Finds the few requests on which the coordinator has ended, at each start."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    some = sa.text("coordinator_losses > 0")
    op.create_index(
        "ix_requests_coordinator_losses",
        "requests",
        ["coordinator_losses"],
        sqlite_where=some,
        postgresql_where=some,
    )
