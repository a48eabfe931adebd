"""Small bodies of requests and results in their rows."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    with op.batch_alter_table("requests") as requests:  # SQLite copies the table
        requests.add_column(sa.Column("payload_body", sa.LargeBinary()))
        requests.add_column(sa.Column("result_body", sa.LargeBinary()))
        requests.alter_column("payload_file", existing_type=sa.BigInteger(), nullable=True)
        requests.alter_column("payload_offset", existing_type=sa.BigInteger(), nullable=True)
