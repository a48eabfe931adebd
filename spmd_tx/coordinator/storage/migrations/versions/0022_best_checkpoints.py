"""Behind which request of its run a checkpoint was saved, and whether people call it the best."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("seq_id", sa.BigInteger()))
    op.add_column(
        "checkpoints", sa.Column("is_best", sa.Boolean(), nullable=False, server_default=sa.false())
    )
