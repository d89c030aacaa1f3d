"""Databases for the service's tests: a file of SQLite, and a database of a real PostgreSQL of this session."""

import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), Path())


def run(folder, *argv):
    """A program of PostgreSQL, which refuses root, as another user with `folder` as its home."""
    user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
    command = [*user, "env", f"HOME={folder}", "LC_ALL=C.UTF-8", PROGRAMS / argv[0], *argv[1:]]
    subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL, timeout=60)


class Postgres:
    """A server without a network, below /tmp: its socket's path is short, and another user can enter."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="pg.", dir="/tmp"))
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody", "nogroup")
        run(
            self.folder,
            "initdb",
            "-D",
            f"{self.folder}/data",
            *("-U", "farpipe", "--auth=trust", "-N", "-E", "UTF8", "--no-locale"),
        )
        with (self.folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(f"listen_addresses=''\nunix_socket_directories='{self.folder}'\nshared_buffers=16MB\n")
        self.start()

    def start(self):
        run(self.folder, "pg_ctl", "-D", f"{self.folder}/data", "-w", "-l", f"{self.folder}/log", "start")

    def stop(self, how="fast"):
        run(self.folder, "pg_ctl", "-D", f"{self.folder}/data", "-w", "-m", how, "stop")

    def url(self, name="postgres"):
        return f"postgresql+psycopg://farpipe@/{name}?host={self.folder}"

    def new_database(self):
        import sqlalchemy as sa

        name = f"t{uuid.uuid4().hex[:12]}"
        engine = sa.create_engine(self.url(), isolation_level="AUTOCOMMIT")
        with engine.connect() as db:
            db.exec_driver_sql(f"create database {name}")
        engine.dispose()
        return self.url(name)


@pytest.fixture(scope="session")
def postgres():
    if not PROGRAMS.name:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    server = Postgres()
    yield server
    server.stop("immediate")
    shutil.rmtree(server.folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    """URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'fleet.sqlite'}"
    return request.getfixturevalue("postgres").new_database()
