"""That there were API keys, so that a server that finds none any more lets nobody in."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    had_keys = sa.Column("had_keys", sa.Boolean(), nullable=False, server_default=sa.false())
    op.add_column("server", had_keys)
