"""Connected transports for tests: the ranks of a run as objects of this process, over real sockets."""

import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from farpipe.engine.transport import PeerError, Rendezvous, TransportConfig, connect
from farpipe.engine.transport.clock import Clock
from farpipe.engine.transport.inbox import allocate_bytes
from farpipe.engine.transport.security.authority import init, issue
from farpipe.engine.transport.security.tls import TlsFiles


class MemoryStore:
    """A key-value store of this process."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key].encode()

    def check(self, keys):
        return all(key in self.values for key in keys)


def in_parallel(*calls):
    """The results of all calls, each made in a thread of its own; an error of one is raised."""
    results, errors = [None] * len(calls), []

    def run(index):
        try:
            results[index] = calls[index]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def connect_all(world_size=2, configs=None, clocks=None, allocate=allocate_bytes, **settings):
    """The transports of all ranks, connected."""
    settings = {"timeout_s": 10.0, "connect_timeout_s": 20.0} | settings
    configs = configs or [TransportConfig(**settings)] * world_size
    clocks = clocks or [Clock()] * world_size
    store = MemoryStore()

    def one(rank):
        rendezvous = Rendezvous(store, rank, world_size)
        return lambda: connect(rank, world_size, configs[rank], rendezvous, clocks[rank], allocate)

    return in_parallel(*map(one, range(world_size)))


@contextmanager
def connected(*args, **settings):
    """As `connect_all`, closed at the end, by then perhaps broken."""
    transports = connect_all(*args, **settings)
    try:
        yield transports
    finally:
        with suppress(PeerError):
            in_parallel(*(transport.close for transport in transports))


def tls_files(folder, sites):
    """The TLS files of every site in `sites`, from a new authority in `folder`."""
    init(folder / "authority")
    for site in dict.fromkeys(sites):
        issue(folder / "authority", site)
    return [TlsFiles.find(folder / "authority", site) for site in sites]


def both_ways(first, second, shape):
    """The `links` setting for one emulated shape between two ranks."""
    return {(first, second): (f"{first}>{second}", shape), (second, first): (f"{second}>{first}", shape)}


RANK_PROGRAM = """
import os, signal, sys, time
from farpipe.engine.links import LinkShape
from farpipe.core.errors import RunError
from farpipe.engine.transport.clock import Clock
from farpipe.engine.launch.reports import reporting_errors
from farpipe.engine.rendezvous import rendezvous_from_env
from farpipe.engine.transport import Tag, TransportConfig, connect

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def join(**settings):
    return connect(RANK, WORLD_SIZE, TransportConfig(**settings), rendezvous_from_env())
"""


def program(body):
    """Program that `launch` runs to have `body` in every rank, after the imports and names above."""
    return lambda rank: [sys.executable, "-c", RANK_PROGRAM + body]


def printed(log_dir, rank):
    """Output of a rank."""
    return (Path(log_dir) / f"rank-{rank}.log").read_text()
