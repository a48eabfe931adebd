"""How many images requests had, by the hour."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.add_column("usage", sa.Column("images", sa.BigInteger(), nullable=False, server_default="0"))
