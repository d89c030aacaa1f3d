"""Timeline: what happened to every action and message of one step, predicted or measured.

Times are seconds since the step began, on one clock. Predicted and measured timelines are the same type, so
comparing them is one function.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from farpipe.core.document import Document
from farpipe.core.errors import InputError
from farpipe.core.simulate.events import ACTION_DTYPE, MESSAGE_DTYPE, MESSAGE_KINDS, Events, OuterArrival, waits
from farpipe.core.step import KINDS, Action, is_inter_site
from farpipe.core.strict import finite
from farpipe.core.units import format_percent

__all__ = ["ACTION_DTYPE", "MESSAGE_DTYPE", "MESSAGE_KINDS", "Timeline"]


@dataclass(frozen=True, repr=False)
class Timeline(Events, Document):
    """Actions and messages of one step with their times, and the figures that follow from them."""

    FORMAT: ClassVar[str] = "farpipe/timeline/1"

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the start of the first action or collective to the end of the last, on any rank.

        A step begins at zero at the latest, with the first of the replicas (`farpipe.core.step.StepTraffic.opens_s`).
        """
        if not len(self.actions):
            return 0.0
        collectives = self.messages[self.messages["microbatch"] < 0]
        start = min([0.0, self.actions["start_s"].min(), *collectives["ready_s"]])
        return float(max([self.actions["end_s"].max(), *collectives["arrival_s"]]) - start)

    @cached_property
    def busy_s(self) -> NDArray[np.float64]:
        """Compute time of every rank: [num_ranks]."""
        durations = self.actions["end_s"] - self.actions["start_s"]
        return np.bincount(self.actions["rank"], weights=durations, minlength=self.num_ranks).astype(np.float64)

    @property
    def bubble_ratio(self) -> float:
        """1 - busy compute time / (number of ranks x makespan)."""
        return float(1 - self.busy_s.sum() / (self.num_ranks * self.makespan_s)) if self.makespan_s else 0.0

    @cached_property
    def exposed_s(self) -> NDArray[np.float64]:
        """Seconds that each rank waited for communication: [num_ranks, 2], between sites and inside a site.

        A wait counts from when the rank was free *and* the message was ready; waiting for the computation of
        another rank is bubble, not exposed communication. After a rank's last action the time until its
        collectives are done counts as well.
        """
        found = waits(self)
        inside = np.array(
            [not self.is_between_sites(name) for name in self.links] + [True]
        )  # the last for hops without a link
        exposed = np.zeros((self.num_ranks, 2))
        place = found["rank"], inside[found["link"]].astype(np.intp)
        np.add.at(exposed, place, found["end_s"] - found["start_s"])
        return exposed

    def is_between_sites(self, link: str) -> bool:
        """True if a link joins two sites."""
        return self.between[self.links.index(link)] if self.between else is_inter_site(link)

    def link_bytes(self) -> dict[str, float]:
        """Bytes that went over every link: those of all replicas that send messages like these (`copies`)."""
        return self._sum_by_link(np.ones(len(self.messages), bool))

    def hop_bytes(self) -> dict[str, float]:
        """The part of `link_bytes` that is no collective's."""
        return self._sum_by_link(self.messages["microbatch"] >= 0)

    def _sum_by_link(self, counted: NDArray[np.bool_]) -> dict[str, float]:
        link, sizes = self.messages["link"], self.messages["bytes"] * self.message_copies
        return {name: float(sizes[counted & (link == i)].sum()) for i, name in enumerate(self.links)}

    @cached_property
    def message_copies(self) -> NDArray[np.int64]:
        """Number of replicas that send a message like each, one after the other: [num_messages]."""
        times = np.array([*(self.copies or (1,) * len(self.links)), 1])  # the last for hops without a link
        return np.where(self.messages["microbatch"] >= 0, times[self.messages["link"]], 1)

    def link_busy_ratio(self) -> dict[str, float]:
        """Share of the makespan in which every link carried something, of whichever replica."""
        durations = (self.messages["end_s"] - self.messages["start_s"]) * self.message_copies
        span = self.makespan_s or 1.0
        return {name: float(durations[self.messages["link"] == i].sum() / span) for i, name in enumerate(self.links)}

    def label(self, action: np.void) -> str:
        """The action in its text form."""
        return str(Action(int(action["stage"]), KINDS[action["kind"]], int(action["microbatch"])))

    def to_body(self) -> dict[str, Any]:
        """The document, with every event and its resource."""
        events = [
            {
                "resource": f"rank {action['rank']}",
                "event": self.label(action),
                "start_s": float(action["start_s"]),
                "end_s": float(action["end_s"]),
            }
            for action in self.actions
        ]
        return {
            "source": self.source,
            "num_ranks": self.num_ranks,
            "links": list(self.links),
            **({"between_sites": list(self.between)} if self._needs_between else {}),
            **({"copies": list(self.copies)} if max(self.copies, default=1) > 1 else {}),
            **({"outer": [arrival._asdict() for arrival in self.outer]} if self.outer else {}),
            "makespan_s": self.makespan_s,
            "events": events + [self._message_data(message) for message in self.messages],
        }

    @property
    def _needs_between(self) -> bool:
        """True if the names of the links do not say which of them join two sites."""
        return self.between not in ((), tuple(map(is_inter_site, self.links)))

    def _message_data(self, message: np.void) -> dict[str, Any]:
        link = int(message["link"])
        return {
            "resource": self.links[link] if link >= 0 else "free hop",
            "event": MESSAGE_KINDS[message["kind"]],
            **{name: int(message[name]) for name in ("stage", "microbatch", "source", "target")},
            **{name: float(message[name]) for name in ("bytes", "ready_s", "start_s", "end_s", "arrival_s")},
        }

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        try:
            links = tuple(str(name) for name in body["links"])
            copies = _parse_copies(body.get("copies", []), links)
            between = _parse_between(body.get("between_sites", []), links)
            outer = tuple(map(_parse_outer, body.get("outer", [])))
            events = [_parse_event(event, links, index) for index, event in enumerate(body["events"])]
            kind, num_ranks = body["source"], body["num_ranks"]
            if kind not in ("predicted", "measured") or type(num_ranks) is not int or num_ranks < 1:
                raise ValueError("source must be 'predicted' or 'measured' and num_ranks a count")
        except (KeyError, TypeError, ValueError, InputError) as error:
            reason = f"missing key {error}" if isinstance(error, KeyError) else error
            raise InputError(f"{source}: not a timeline: {reason}") from None
        actions = np.array([row for dtype, row in events if dtype is ACTION_DTYPE], dtype=ACTION_DTYPE)
        messages = np.array([row for dtype, row in events if dtype is MESSAGE_DTYPE], dtype=MESSAGE_DTYPE)
        return cls(kind, num_ranks, links, actions, messages, copies, between, outer)

    def __repr__(self) -> str:
        inter, intra = self.exposed_s.sum(axis=0)
        return (
            f"Timeline ({self.source}): {self.num_ranks} ranks, {len(self.actions)} actions, "
            f"{len(self.messages)} messages, makespan {self.makespan_s:.4g} s, bubble "
            f"{format_percent(self.bubble_ratio)}, exposed {inter:.4g} s between sites and {intra:.4g} s inside (sum "
            "over ranks)"
        )


def _parse_copies(value: Any, links: Sequence[str]) -> tuple[int, ...]:
    copies = tuple(value)
    if len(copies) not in (0, len(links)) or not all(type(count) is int and count >= 1 for count in copies):
        raise ValueError(f"copies: expected a count for each of {len(links)} links, found {value!r}")
    return copies


def _parse_between(value: Any, links: Sequence[str]) -> tuple[bool, ...]:
    between = tuple(value)
    if len(between) not in (0, len(links)) or not all(type(is_so) is bool for is_so in between):
        raise ValueError(f"between_sites: expected true or false for each of {len(links)} links, found {value!r}")
    return between


def _parse_outer(data: Any) -> OuterArrival:
    what, source = data["what"], data["source"]
    if not isinstance(what, str) or not isinstance(source, str):
        raise ValueError(f"outer: expected names, found {what!r} and {source!r}")
    size, arrival_s, needed_s = (finite(data[name], minimum=-np.inf) for name in OuterArrival._fields[2:])
    return OuterArrival(what, source, size, arrival_s, needed_s)


def _parse_event(event: Any, links: Sequence[str], index: int) -> tuple[np.dtype[np.void], tuple[Any, ...]]:
    if not isinstance(event, dict):
        raise ValueError(f"events[{index}] is not an object")
    start, end = finite(event["start_s"], minimum=-np.inf), finite(event["end_s"], minimum=-np.inf)
    resource, name = event["resource"], event["event"]
    if str(resource).startswith("rank ") and resource not in links:
        action = Action.parse(name)
        kind = KINDS.index(action.kind)
        return ACTION_DTYPE, (int(resource[5:]), action.stage, kind, action.microbatch, start, end)
    link = -1 if resource == "free hop" else links.index(resource)
    whole = tuple(int(event[key]) for key in ("stage", "microbatch", "source", "target"))
    stage, microbatch, sender, receiver = whole
    size, ready, arrival = (finite(event[key], minimum=-np.inf) for key in ("bytes", "ready_s", "arrival_s"))
    kind = MESSAGE_KINDS.index(name)
    return MESSAGE_DTYPE, (link, kind, stage, microbatch, sender, receiver, size, ready, start, end, arrival)
