"""Training runs that hold a copy of a checkpoint."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("models", sa.Column("copied_from", sa.String()))
