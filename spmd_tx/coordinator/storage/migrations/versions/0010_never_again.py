"""Which finished requests must not be run again, and an index of those that the operator has given up."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

IS_GIVEN_UP = sa.text("given_up IS NOT NULL")


def upgrade() -> None:
    op.add_column("requests", sa.Column("never_again", sa.String()))
    op.create_index(
        "ix_requests_given_up",
        "requests",
        ["number"],
        sqlite_where=IS_GIVEN_UP,
        postgresql_where=IS_GIVEN_UP,
    )
