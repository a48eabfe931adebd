"""The optimizer of a model. All earlier ones have AdamW."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("models", sa.Column("optimizer", sa.String(), nullable=False, server_default="adamw"))
