"""Messages between ranks over real networks: eager, tagged, several TCP streams per channel, nothing waits for ever."""

from farpipe.runtime.transport.config import TransportConfig
from farpipe.runtime.transport.health import PeerError
from farpipe.runtime.transport.message import ChannelKind, Message, MessageTimes, Tag
from farpipe.runtime.transport.rendezvous import Rendezvous, rendezvous_from_env
from farpipe.runtime.transport.transport import Transport, connect

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
    "rendezvous_from_env",
]
