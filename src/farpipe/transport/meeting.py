"""Bringing the ranks of a run together: from a rendezvous to a Transport that is connected."""

from contextlib import ExitStack

from farpipe.emulate import EmulatedLinks
from farpipe.transport.clock import Clock
from farpipe.transport.config import TransportConfig
from farpipe.transport.inbox import Allocate, allocate_bytes
from farpipe.transport.rendezvous import Meeting, introduce
from farpipe.transport.security.tls import Credentials
from farpipe.transport.tcp import listen
from farpipe.transport.transport import Transport


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
    transport = Transport(rank, world_size, config, clock or Clock.from_environment(), allocate)
    credentials, shapes = Credentials(config.tls), config.link_shapes()
    with ExitStack() as undo:
        listener = undo.enter_context(listen(config))
        links = EmulatedLinks.create(shapes) if shapes and rank == 0 else None
        if links:
            undo.callback(links.close)
        ranks = introduce(rank, listener, config, rendezvous, links)
        if shapes and rank:
            links = EmulatedLinks.open(ranks[0].links_path, shapes)
        undo.pop_all()
    try:
        transport.start(listener, rendezvous.token, ranks, links, credentials)
    except BaseException as error:
        transport.__exit__(type(error), error, None)  # Ctrl-C too, or `close` would wait for goodbyes
        raise
    return transport
