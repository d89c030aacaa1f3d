"""Messages between ranks over real networks: eager, tagged, several TCP streams per channel, nothing waits for ever."""

from farpipe.transport.config import TransportConfig
from farpipe.transport.health import PeerError
from farpipe.transport.message import ChannelKind, Message, MessageTimes, Tag
from farpipe.transport.rendezvous import Rendezvous
from farpipe.transport.transport import Transport, connect

__all__ = [
    "ChannelKind",
    "Message",
    "MessageTimes",
    "PeerError",
    "Rendezvous",
    "Tag",
    "Transport",
    "TransportConfig",
    "connect",
]
