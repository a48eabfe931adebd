"""Images that requests refer to, each once for its owner."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.create_table(
        "images",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("content_body", sa.LargeBinary()),
        sa.Column("content_file", sa.BigInteger()),
        sa.Column("content_offset", sa.BigInteger()),
        sa.Column("content_length", sa.BigInteger(), nullable=False),
        sa.Column("patches", sa.String()),
        sa.UniqueConstraint("owner", "digest"),
    )
    op.create_index("ix_images_content_file", "images", ["content_file"])
    op.create_table(
        "request_images",
        sa.Column("request", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("image", sa.BigInteger(), primary_key=True, autoincrement=False),
    )
    op.create_index("ix_request_images_image", "request_images", ["image"])
