"""Which requests the coordinator ended on, and which ones the operator has given up."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    losses = sa.Column("coordinator_losses", sa.Integer(), nullable=False, server_default="0")
    op.add_column("requests", losses)
    op.add_column("requests", sa.Column("given_up", sa.String()))
