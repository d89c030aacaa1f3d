"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    """Make the tables of version 1, written out: `farpipe.service.tables` goes on changing."""
    op.create_table(
        "log",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("time_s", sa.Double, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("line", sa.Text, nullable=False),
    )
    op.create_table(
        "snapshot",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, index=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("submission", sa.Text, nullable=False),
        sa.Column("submitted_s", sa.Double, nullable=False),
        sa.Column("ended_s", sa.Double),
        sa.Column("view", sa.Text),
    )
    op.create_table(
        "attempts",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("place", sa.Text, nullable=False),
        sa.Column("began_s", sa.Double, nullable=False),
        sa.Column("ended_s", sa.Double),
        sa.Column("result", sa.Text),
        sa.Column("why", sa.Text),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("num_steps", sa.Integer, nullable=False),
        sa.Column("num_stored", sa.Integer, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("sha256", sa.Text, nullable=False, unique=True),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("until_s", sa.Double, nullable=False),
    )
    op.create_table(
        "lease",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("until_s", sa.Double, nullable=False),
    )
