"""API keys, and whose sessions and checkpoints are: those from before belong to "local"."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("hash", sa.String(), nullable=False, unique=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("last_used_at", sa.Double()),
        sa.Column("adapters", sa.Integer()),
        sa.Column("queued_requests", sa.Integer()),
        sa.Column("requests_per_second", sa.Double()),
    )
    for table in ("sessions", "checkpoints"):
        op.add_column(table, sa.Column("owner", sa.String(), nullable=False, server_default="local"))
        op.create_index(f"ix_{table}_owner", table, ["owner"])
