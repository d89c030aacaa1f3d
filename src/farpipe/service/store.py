"""The service's store: a log whose numbers are the fence, snapshots, jobs, tokens, and the lease of who acts.

SQLite or PostgreSQL, by URL. What is answered is on the disk: SQLite writes ahead and through.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import postgresql, sqlite

from farpipe.core.errors import InputError, RunError
from farpipe.fleet.documents import Entry, restored, state_data, state_of
from farpipe.fleet.state import FleetState
from farpipe.service.tables import ATTEMPTS, JOBS, LEASE, LOG, SNAPSHOT, TABLES, TOKENS

SNAPSHOT_EVERY: Final = 500
"""Lines between two snapshots."""
KEPT_S: Final = 90 * 86400.0
"""Age at which lines that a snapshot has made needless are removed."""
LEASE_S: Final = 10.0
"""Time after which another instance acts for one that is silent."""
FLEET: Final = "fleet"
Row = dict[str, Any]


class DeposedError(RunError):
    """Another instance has written to the log: this one does not lead any more."""


@dataclass
class Change:
    """All that one decision writes, in one transaction."""

    time_s: float
    who: str
    """Who asked for what, for people."""
    line: str
    jobs: list[Row] = field(default_factory=list)
    """Rows of `JOBS` that are new."""
    closed: list[Row] = field(default_factory=list)
    """``name``, ``ended_s`` and ``view`` of jobs that have ended."""
    begun: list[Row] = field(default_factory=list)
    """Rows of `ATTEMPTS` that are new."""
    over: list[Row] = field(default_factory=list)
    """``job``, ``attempt`` and, as far as they are known, ``ended_s``, ``result`` and ``why`` of attempts that end."""
    heard: list[Row] = field(default_factory=list)
    """``job``, ``attempt``, ``offset``, ``num_steps`` and ``num_stored`` of attempts that were read further."""


class Store:
    """A database, brought to the newest version of the tables; `SQLAlchemyError` where it can't be reached."""

    def __init__(self, url: str) -> None:
        try:
            self._engine = sa.create_engine(url, pool_pre_ping=True)
        except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ModuleNotFoundError) as error:
            raise InputError(
                f"--database: {error}; expected sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
            ) from None
        self._is_lite = self._engine.dialect.name == "sqlite"
        if self._is_lite:
            sa.event.listen(self._engine, "connect", _settings)
            sa.event.listen(self._engine, "begin", _begin)
        now = "(julianday('now') - 2440587.5) * 86400.0" if self._is_lite else "extract(epoch from clock_timestamp())"
        self._now_s: sa.ColumnElement[float] = sa.literal_column(now)
        self._writing = self._engine.execution_options(is_writing=True)
        self.number = 0
        """The log's last line that was written or read here."""
        self._snapshot = 0

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        with self._writing.begin() as db:
            yield db

    def migrate(self) -> None:
        """Bring the tables to the newest version; two instances may do it at once."""
        config = Config()
        config.set_main_option("script_location", "farpipe.service:migrations")
        script = ScriptDirectory.from_config(config)
        with self._write() as db:
            if not self._is_lite:
                db.execute(sa.select(sa.func.pg_advisory_xact_lock(47)))

            def steps(revision: Any, _: Any) -> Any:
                return script._upgrade_revs("head", revision)  # what alembic.command.upgrade does

            with EnvironmentContext(config, script, fn=steps) as environment:
                environment.configure(connection=db, target_metadata=TABLES)
                environment.run_migrations()

    def leads(self, owner: str) -> bool:
        """Take or keep the lease; False while another has it."""
        free = sa.or_(LEASE.c.until_s < self._now_s, LEASE.c.owner == owner)
        with self._write() as db:
            until_s = db.execute(sa.select(self._now_s)).scalar_one()
            row = {"name": FLEET, "owner": owner, "until_s": float(until_s) + LEASE_S}
            insert = (sqlite if self._is_lite else postgresql).insert(LEASE).values(row)
            news = {"owner": insert.excluded.owner, "until_s": insert.excluded.until_s}
            upsert = insert.on_conflict_do_update(index_elements=[LEASE.c.name], set_=news, where=free)
            return db.execute(upsert.returning(LEASE.c.owner)).first() is not None

    def resign(self, owner: str) -> None:
        """Give the lease back, so that another instance need not wait for its end."""
        with self._write() as db:
            db.execute(sa.delete(LEASE).where(LEASE.c.owner == owner))

    def leader(self) -> str:
        """Owner of the lease; empty: nobody has one."""
        with self._engine.begin() as db:
            return db.execute(sa.select(LEASE.c.owner).where(LEASE.c.until_s >= self._now_s)).scalar() or ""

    def load(self, first: FleetState) -> FleetState:
        """The state of the last line; `first`: that of a fleet without a log."""
        with self._engine.begin() as db:
            found = db.execute(sa.select(SNAPSHOT).order_by(SNAPSHOT.c.number.desc()).limit(1)).first()
            self._snapshot = self.number = found.number if found else 0
            lines = self._lines(db, self.number)
        quotes = first.world.quotes
        state = state_of(json.loads(found.body), first.policy, quotes, "snapshot") if found else first
        self.number += len(lines)
        return restored(state, lines)

    def follow(self, state: FleetState) -> FleetState:
        """`state` after the lines that others have written since."""
        with self._engine.begin() as db:
            lines = self._lines(db, self.number)
        for line in lines:
            state = Entry.from_line(line).applied(state)
        self.number += len(lines)
        return state

    def _lines(self, db: sa.Connection, number: int) -> list[str]:
        return list(db.execute(sa.select(LOG.c.line).where(LOG.c.number > number).order_by(LOG.c.number)).scalars())

    def write(self, change: Change, state: FleetState) -> None:
        """Write a decision; `DeposedError` if another instance has written one meanwhile."""
        number = self.number + 1
        is_due = number >= self._snapshot + SNAPSHOT_EVERY
        with self._write() as db:
            try:
                row = {"number": number, "time_s": change.time_s, "who": change.who, "line": change.line}
                db.execute(sa.insert(LOG), row)
            except sa.exc.IntegrityError:
                raise DeposedError(f"another instance has written line {number} of the log") from None
            _write_rows(db, change)
            if is_due:
                body = json.dumps(state_data(state), allow_nan=False)
                db.execute(sa.delete(SNAPSHOT).where(SNAPSHOT.c.number < self._snapshot))
                db.execute(sa.insert(SNAPSHOT), {"number": number, "body": body})
                old = sa.and_(LOG.c.number <= self._snapshot, LOG.c.time_s < change.time_s - KEPT_S)
                db.execute(sa.delete(LOG).where(old))
        self.number, self._snapshot = number, number if is_due else self._snapshot

    def entries(self, after: int, limit: int) -> list[Row]:
        """Lines of the log after number `after`."""
        found = sa.select(LOG).where(LOG.c.number > after).order_by(LOG.c.number).limit(limit)
        return self._rows(found)

    def asked(self, limit: int) -> list[Row]:
        """Number, time and askers of the newest decisions that somebody asked for."""
        found = sa.select(LOG.c.number, LOG.c.time_s, LOG.c.who).where(LOG.c.who != "")
        return self._rows(found.order_by(LOG.c.number.desc()).limit(limit))

    def job(self, name: str) -> Row | None:
        """The newest job of that name."""
        found = self._rows(sa.select(JOBS).where(JOBS.c.name == name).order_by(JOBS.c.id.desc()).limit(1))
        return found[0] if found else None

    def submissions(self) -> dict[str, str]:
        """What was submitted as the jobs that have not ended, by name."""
        rows = self._rows(sa.select(JOBS.c.name, JOBS.c.submission).where(JOBS.c.ended_s.is_(None)))
        return {row["name"]: row["submission"] for row in rows}

    def ended(self, tenant: str | None, limit: int) -> list[Row]:
        """The jobs that ended last; those of one tenant, or None: of all."""
        found = sa.select(JOBS.c.view).where(JOBS.c.ended_s.is_not(None)).order_by(JOBS.c.ended_s.desc()).limit(limit)
        return self._rows(found if tenant is None else found.where(JOBS.c.tenant == tenant))

    def attempts(self, job: str) -> list[Row]:
        """The attempts of a job, the first one first."""
        return self._rows(sa.select(ATTEMPTS).where(ATTEMPTS.c.job == job).order_by(ATTEMPTS.c.attempt))

    def attempts_since(self, time_s: float, limit: int) -> list[Row]:
        """The newest attempts that ran after `time_s`, of all jobs."""
        found = sa.select(ATTEMPTS).where(sa.or_(ATTEMPTS.c.ended_s.is_(None), ATTEMPTS.c.ended_s >= time_s))
        return self._rows(found.order_by(ATTEMPTS.c.began_s.desc()).limit(limit))

    def heard(self) -> list[Row]:
        """How far each attempt that is not over was heard."""
        return self._rows(sa.select(ATTEMPTS).where(ATTEMPTS.c.ended_s.is_(None)))

    def token(self, sha256: str) -> Row | None:
        """The token with this hash, if it has not ended."""
        found = self._rows(sa.select(TOKENS).where(TOKENS.c.sha256 == sha256, TOKENS.c.until_s >= self._now_s))
        return found[0] if found else None

    def tokens(self) -> list[Row]:
        """All tokens, their hashes left out."""
        return self._rows(sa.select(TOKENS.c.id, TOKENS.c.role, TOKENS.c.tenant, TOKENS.c.until_s))

    def add_token(self, row: Row) -> None:
        """Write a token."""
        with self._write() as db:
            db.execute(sa.insert(TOKENS), row)

    def remove_token(self, name: str) -> bool:
        """Remove the token of this id; False if there is none."""
        with self._write() as db:
            return db.execute(sa.delete(TOKENS).where(TOKENS.c.id == name)).rowcount > 0

    def _rows(self, select: sa.Select[Any]) -> list[Row]:
        with self._engine.begin() as db:
            return [dict(row) for row in db.execute(select).mappings()]


def _write_rows(db: sa.Connection, change: Change) -> None:
    for table, rows in ((JOBS, change.jobs), (ATTEMPTS, change.begun)):
        if rows:
            db.execute(sa.insert(table), rows)
    closed = sa.update(JOBS).where(JOBS.c.name == sa.bindparam("job"), JOBS.c.ended_s.is_(None))
    _update(db, closed, change.closed)
    of_attempt = sa.update(ATTEMPTS).where(
        ATTEMPTS.c.job == sa.bindparam("key_job"), ATTEMPTS.c.attempt == sa.bindparam("key_attempt")
    )
    for rows in (change.over, change.heard):
        _update(db, of_attempt, [_keyed(row) for row in rows])


def _keyed(row: Mapping[str, Any]) -> Row:
    return {f"key_{name}" if name in ("job", "attempt") else name: value for name, value in row.items()}


def _update(db: sa.Connection, update: Any, rows: Iterable[Row]) -> None:
    for row in rows:
        values: Row = {name: sa.bindparam(name) for name in row if not name.startswith("key_") and name != "job"}
        db.execute(update.values(**values), row)


def _settings(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where we say, see `_begin`
    for pragma in ("busy_timeout=5000", "journal_mode=wal", "synchronous=full"):
        connection.execute(f"pragma {pragma}")


def _begin(db: sa.Connection) -> None:
    """A transaction that will write waits for others at its begin: later it would find their writes, and fail."""
    db.exec_driver_sql("begin immediate" if db.get_execution_options().get("is_writing") else "begin")
