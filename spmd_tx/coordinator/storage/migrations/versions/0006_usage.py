"""When requests began, were sent and answered; usage by the hour, stored bytes, the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    for name in ("key_id", "finish_reason", "finish_detail"):
        op.add_column("sessions", sa.Column(name, sa.String()))
    op.create_index("ix_sessions_created_at", "sessions", ["created_at"])
    for name in ("began_at", "sent_at", "replied_at"):
        op.add_column("requests", sa.Column(name, sa.Double()))
    op.add_column("requests", sa.Column("tokens", sa.BigInteger()))
    _create_past_requests()
    _create_usage()
    _create_audit()


def _create_past_requests() -> None:
    op.create_table(
        "past_requests",
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("line", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False, index=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("began_at", sa.Double()),
        sa.Column("sent_at", sa.Double()),
        sa.Column("replied_at", sa.Double()),
        sa.Column("finished_at", sa.Double(), nullable=False, index=True),
        sa.Column("tokens", sa.BigInteger()),
        sa.Column("category", sa.String()),
    )


def _create_usage() -> None:
    op.create_table(
        "usage",
        sa.Column("hour", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("line", sa.String(), primary_key=True),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String()),
        sa.Column("owner", sa.String(), nullable=False, index=True),
        sa.Column("key_id", sa.String()),
        sa.Column("base_model", sa.String()),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("trained", "forwarded", "prompt", "cached", "sampled")
        ),
        sa.Column("checkpoints", sa.Integer(), nullable=False),
    )
    op.create_table(
        "stored_checkpoints",
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False, index=True),
        sa.Column("session_id", sa.String()),
        sa.Column("base_model", sa.String()),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("deleted_at", sa.Double(), index=True),
        sa.UniqueConstraint("run_id", "kind", "name", "created_at"),
    )


def _create_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("at", sa.Double(), nullable=False, index=True),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("key_id", sa.String()),
        sa.Column("owner", sa.String(), nullable=False, index=True),
        sa.Column("details", sa.JSON(), nullable=False),
    )
