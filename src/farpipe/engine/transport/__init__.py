"""Messages between processes over real networks: bytes with a tag, sent eagerly; nothing waits for ever. No torch.

One message's path, with the file of each station (a tensor comes to it through `farpipe.engine.executor.peers`):

    sender    Transport.send       transport.py       finds the channel: peer and kind, such as forward
              Outbox               outbox.py          bounded queue; cuts messages into fragments for its streams
              Stream.sender        frames.py          fragment -> frame (wire.py), kept until it is acknowledged
              Connection           connection.py      one TCP connection, within TLS (security/), paced (tcp.py)
                  the network
    receiver  Connection           connection.py
              Stream.receiver      frames.py          bytes -> frames, counted and acknowledged
              FragmentReceiver     inbox.py           frame -> fragment, checked against what was said of the message
              Inbox                inbox.py           fragments -> message, in bounded memory, until it is asked for
              Transport.receive    transport.py       hands it over, or says what was waited for and how long

Around it:

    start     meeting.py and rendezvous.py (who is where), handshake.py (who may connect),
              dialler.py (who calls, who listens), tcp.py (options, rates, up to speed before the first message)
    threads   loop.py: a few threads serve all streams (stream.py)
    trouble   reconnector.py makes a broken connection again, and the stream resends what did not arrive;
              health.py ends every wait when that takes too long, or when a process gives up
    control   control_plane.py (exchanges, posts, pings, outages, farewells; between whom),
              control_link.py (a neighbour's connection, and what has come)
    measure   clock.py (offsets between machines), link_events.py (outages, reconnections, retransmissions),
              link_probe.py (`farpipe probe`: a run of two ranks)
"""

from farpipe.engine.transport.config import TransportConfig
from farpipe.engine.transport.health import PeerError
from farpipe.engine.transport.link_events import LinkEvent
from farpipe.engine.transport.meeting import connect
from farpipe.engine.transport.rendezvous import Rendezvous
from farpipe.engine.transport.transport import Transport
from farpipe.engine.transport.wire import ChannelKind, Message, MessageTimes, Tag

__all__ = [
    "ChannelKind",
    "LinkEvent",
    "Message",
    "MessageTimes",
    "PeerError",
    "Rendezvous",
    "Tag",
    "Transport",
    "TransportConfig",
    "connect",
]
