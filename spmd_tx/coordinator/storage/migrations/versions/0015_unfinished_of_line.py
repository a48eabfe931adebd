"""An index that finds the unfinished requests of a line, however many finished ones it has."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    is_unfinished = sa.text("finished_at IS NULL")
    op.create_index(
        "ix_requests_unfinished_of_line",
        "requests",
        ["line", "seq_id"],
        sqlite_where=is_unfinished,
        postgresql_where=is_unfinished,
    )
