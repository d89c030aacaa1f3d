"""Links whose times are agreed on instead of being left to a network: what the transport asks of them.

Over a real link a message arrives when it arrives. Where the ranks stand on one machine and a link is emulated, the
sender asks for a `Passage`, and the receiver hands the message over at its end. The transport knows this protocol
alone; `engine.links` implements it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self


class Passage(NamedTuple):
    """One message's passage over a link: on it from `start_ns` to `end_ns`, at the other side at `arrival_ns`.

    All are nanoseconds of CLOCK_MONOTONIC, which every process on one machine reads alike.
    """

    start_ns: int
    end_ns: int
    arrival_ns: int


class Links(Protocol):
    """All such links of a run, shared by its ranks."""

    @property
    def path(self) -> str:
        """Path under which the other ranks open the same links."""

    def reserve(self, name: str, num_bytes: int) -> Passage:
        """Put a message on link `name`, behind what is on it."""

    def reserve_beside(self, name: str, num_bytes: int) -> Passage:
        """Put a small control message on the link now, whatever else is on it."""

    def change(self, name: str, shape: Any) -> None:
        """Give a link another shape, of the class that they were made of, from now on."""

    def close(self) -> None:
        """Release the links in this process."""


class Shape(Protocol):
    """Properties of one link, from which links of its kind are made."""

    @classmethod
    def create(cls, shapes: Mapping[str, Self]) -> Links:
        """New links by name, all free; one rank makes them."""

    @classmethod
    def open(cls, path: str, shapes: Mapping[str, Self]) -> Links:
        """The links that another rank created; InputError when its shapes are not `shapes`."""


class Path(Protocol):
    """A path that one message has for itself, whatever else is on its way."""

    def passage(self, num_bytes: int, ready_ns: int) -> Passage:
        """Times of a message of `num_bytes` that is ready at `ready_ns`."""


class Shared:
    """Links of another transport in this process, which stay open when this one is closed."""

    def __init__(self, links: Links) -> None:
        self._links, self.path = links, links.path
        self.reserve, self.reserve_beside, self.change = links.reserve, links.reserve_beside, links.change

    def close(self) -> None:
        """Do nothing: whoever made them closes them."""
