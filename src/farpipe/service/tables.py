"""Tables of the service's database, the same for SQLite and PostgreSQL; `migrations/` makes them.

The log and its snapshots are the fleet; the other tables are what was asked for and what is shown.
"""

from typing import Final

import sqlalchemy as sa

TABLES: Final = sa.MetaData()

LOG: Final = sa.Table(
    "log",
    TABLES,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("time_s", sa.Double, nullable=False),
    sa.Column("who", sa.Text, nullable=False),
    sa.Column("line", sa.Text, nullable=False),
)
"""A line for every decision; its number is the fence: who finds it taken does not lead any more."""

SNAPSHOT: Final = sa.Table(
    "snapshot",
    TABLES,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("body", sa.Text, nullable=False),
)
"""The state after the log's line of this number."""

JOBS: Final = sa.Table(
    "jobs",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, index=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("submission", sa.Text, nullable=False),
    sa.Column("submitted_s", sa.Double, nullable=False),
    sa.Column("ended_s", sa.Double),
    sa.Column("view", sa.Text),
)
"""Every job that was taken: what was submitted, and how it looked when it ended. A name is used again after its end."""

ATTEMPTS: Final = sa.Table(
    "attempts",
    TABLES,
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
"""Every start: where, how it ended, and how far it was heard (bytes of its metrics, steps, steps stored)."""

TOKENS: Final = sa.Table(
    "tokens",
    TABLES,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("sha256", sa.Text, nullable=False, unique=True),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("until_s", sa.Double, nullable=False),
)

LEASE: Final = sa.Table(
    "lease",
    TABLES,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("until_s", sa.Double, nullable=False),
)
"""The instance that acts, by the database's clock."""
