"""The base model of each checkpoint, for listings and searches. The next start takes it from the folders."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("base_model", sa.String()))
