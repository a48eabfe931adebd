"""How many copies of a sampling client have joined its sampler."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("samplers", sa.Column("clients", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("samplers", sa.Column("inflight", sa.Boolean(), nullable=False, server_default=sa.false()))
