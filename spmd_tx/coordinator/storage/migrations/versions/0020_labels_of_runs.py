"""What people note about a run in the console: a name, a group, and that it is archived."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("models", sa.Column("name", sa.String()))
    op.add_column("models", sa.Column("run_group", sa.String()))
    op.add_column("models", sa.Column("archived_at", sa.Double()))
