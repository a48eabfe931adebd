"""A limit of keys: the tokens that queued samples may take."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("keys", sa.Column("queued_tokens", sa.BigInteger()))
