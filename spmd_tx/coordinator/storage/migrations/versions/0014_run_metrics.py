"""The metrics of every step of a training run, and those that clients send."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "run_metrics",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("line", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger()),
        sa.Column("metrics", sa.JSON(), nullable=False),
    )
    op.create_index("ix_run_metrics_order", "run_metrics", ["line", "seq_id"])
    op.create_index("ix_run_metrics_kind", "run_metrics", ["line", "kind"])
    op.create_index("ix_run_metrics_at", "run_metrics", ["at"])
