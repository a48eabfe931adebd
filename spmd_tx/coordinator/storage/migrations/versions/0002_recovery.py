"""What a restoration needs: which requests count, snapshots, and the number of the last generation.

Models of the earlier schema cannot be restored: nothing says which of their requests were carried out.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("requests") as requests:
        requests.add_column(sa.Column("executed", sa.Boolean(), nullable=False, server_default=sa.false()))
        requests.add_column(sa.Column("digest", sa.String()))
        requests.add_column(sa.Column("layout", sa.String()))
        requests.add_column(sa.Column("losses", sa.Integer(), nullable=False, server_default="0"))
        requests.add_column(sa.Column("losses_by_command", sa.Integer(), nullable=False, server_default="0"))
    with op.batch_alter_table("models") as models:
        models.drop_column("is_lost")
    with op.batch_alter_table("samplers") as samplers:
        samplers.drop_column("is_lost")
        samplers.add_column(sa.Column("version", sa.String()))
    op.create_table(
        "snapshots",
        sa.Column("model_id", sa.String(), primary_key=True),
        sa.Column("seq_id", sa.BigInteger(), primary_key=True),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("optimizer", sa.Boolean(), nullable=False),
        sa.Column("adapter", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "server",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("generation", sa.BigInteger(), nullable=False),
    )
    op.execute("INSERT INTO server (id, generation) VALUES (1, 0)")
