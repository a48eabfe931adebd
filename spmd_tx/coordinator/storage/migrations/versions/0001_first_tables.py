"""Sessions, models, samplers, checkpoints and requests."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), index=True),
        sa.Column("ended_because", sa.String()),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("project_id", sa.String()),
        sa.Column("display_name", sa.String()),
        sa.Column("sdk_version", sa.String()),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("session_id", sa.String(), nullable=False, index=True),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("created_at", sa.Double(), nullable=False, index=True),
        sa.Column("is_lost", sa.Boolean(), nullable=False),
    )
    op.create_table(
        "samplers",
        sa.Column("id", sa.String(), primary_key=True),
        sa.Column("session_id", sa.String(), nullable=False, index=True),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String()),
        sa.Column("model_id", sa.String()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("is_lost", sa.Boolean(), nullable=False),
    )
    op.create_table(
        "checkpoints",
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("is_public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("created_at", sa.Double(), nullable=False, index=True),
        sa.Column("expires_at", sa.Double(), index=True),
        sa.UniqueConstraint("run_id", "kind", "name"),
    )
    op.create_table(
        "requests",
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("id", sa.String(), nullable=False, unique=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("line", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False, index=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("payload_file", sa.BigInteger(), nullable=False, index=True),
        sa.Column("payload_offset", sa.BigInteger(), nullable=False),
        sa.Column("payload_length", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.Double()),
        sa.Column("content_type", sa.String()),
        sa.Column("result_file", sa.BigInteger(), index=True),
        sa.Column("result_offset", sa.BigInteger()),
        sa.Column("result_length", sa.BigInteger()),
        sa.Column("error", sa.String()),
        sa.Column("category", sa.String()),
        sa.UniqueConstraint("line", "seq_id"),
    )
    op.create_index("ix_requests_unfinished", "requests", ["finished_at", "number"])
