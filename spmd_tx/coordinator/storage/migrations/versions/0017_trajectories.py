"""Trajectories: what agents have sampled, as trees of turns."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "trajectories",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double()),
        sa.Column("model", sa.String()),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("reward", sa.Double()),
        sa.Column("metrics", sa.JSON()),
        sa.Column("turns", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("owner", "name"),
    )
    op.create_index("ix_trajectories_used_at", "trajectories", ["used_at"])
    op.create_table(
        "turns",
        sa.Column("request_id", sa.String(), primary_key=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("parent", sa.String()),
        sa.Column("base", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("weights", sa.String()),
        sa.Column("dialect", sa.String(), nullable=False),
        sa.Column("agent", sa.String()),
        sa.Column("cause", sa.String(), nullable=False),
        sa.Column("cause_message", sa.BigInteger()),
        sa.Column("reused", sa.BigInteger(), nullable=False),
        sa.Column("new", sa.BigInteger(), nullable=False),
        sa.Column("prompt", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("finished_at", sa.Double()),
        sa.Column("sampled", sa.BigInteger()),
        sa.Column("cached", sa.BigInteger()),
        sa.Column("samples", sa.LargeBinary()),
        sa.Column("rewards", sa.JSON()),
    )
    op.create_index("ix_turns_order", "turns", ["trajectory_id", "number"])
