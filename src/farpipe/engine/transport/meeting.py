"""Bringing the ranks of a run together: from a rendezvous to a Transport that is connected."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from farpipe.core.errors import FarpipeError
from farpipe.engine.transport.clock import Clock
from farpipe.engine.transport.config import TransportConfig
from farpipe.engine.transport.health import PeerError
from farpipe.engine.transport.inbox import Allocate, allocate_bytes
from farpipe.engine.transport.rendezvous import Meeting, introduce
from farpipe.engine.transport.security.tls import Credentials
from farpipe.engine.transport.tcp import listen
from farpipe.engine.transport.transport import Transport


def connect(
    rank: int,
    world_size: int,
    config: TransportConfig,
    rendezvous: Meeting,
    clock: Clock | None = None,
    allocate: Allocate = allocate_bytes,
) -> Transport:
    """Meet the other ranks and open the control connections to all of them; data channels open at first use.

    `clock` None: the process's. `allocate` gives the memory of received messages. Raises InputError for a port that is
    taken or links that differ between the ranks, RunError naming the ranks that did not come within
    `connect_timeout_s`.
    """
    with telling_others(rendezvous):
        return _connect(rank, world_size, config, rendezvous, clock or Clock.from_environment(), allocate)


@contextmanager
def telling_others(rendezvous: Meeting) -> Iterator[None]:
    """Inside, what keeps this rank from the meeting is said there: the others need not wait for it in vain."""
    try:
        yield
    except FarpipeError as error:
        if not isinstance(error, PeerError):  # the others have that from where it comes from
            rendezvous.give_up(str(error))
        raise


def _connect(
    rank: int, world_size: int, config: TransportConfig, rendezvous: Meeting, clock: Clock, allocate: Allocate
) -> Transport:
    transport = Transport(rank, world_size, config, clock, allocate)
    credentials, shapes = Credentials(config.tls), config.link_shapes()
    one_of_them = next(iter(shapes.values()), None)
    with ExitStack() as undo:
        listener = undo.enter_context(listen(config))
        links = config.open_links() if config.open_links is not None else None
        if one_of_them and links is None and rank == 0:
            links = one_of_them.create(shapes)
        if links:
            undo.callback(links.close)
        ranks = introduce(rank, listener, config, rendezvous, links)
        if one_of_them and links is None:
            links = one_of_them.open(ranks[0].links_path, shapes)
        undo.pop_all()
    try:
        transport.start(listener, rendezvous, ranks, links, credentials)
    except BaseException as error:
        transport.__exit__(type(error), error, None)  # Ctrl-C too, or `close` would wait for goodbyes
        raise
    return transport
