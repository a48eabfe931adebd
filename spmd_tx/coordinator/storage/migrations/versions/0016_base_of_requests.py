"""Which base model a request is about. Null: the first one of its data directory, as in all earlier rows."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    for table in ("requests", "past_requests"):
        op.add_column(table, sa.Column("base", sa.String()))
