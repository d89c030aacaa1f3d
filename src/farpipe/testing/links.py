"""Check of links whose times are agreed on: the protocol that the transport asks for a message's passage."""

import time
from itertools import pairwise

from farpipe.core.arguments import expect_kind
from farpipe.engine.transport.passages import Links, Passage, Shape

SIZES = (0, 1, 1_000, 1_000_000)


def check_link(shape: Shape) -> None:
    """Check links of `shape`, as the transport uses them: two directions, shared by several openings.

    A message leaves when it is put there or later, in the order in which it was, is off the link before it arrives, and
    takes no less time than a smaller one; both directions are independent; what opens the links by their path shares
    them; a small control message goes now, whatever is on the link. Raises AssertionError with everything that is
    wrong. Takes less than a second and sends nothing.
    """
    if not callable(getattr(shape, "create", None)):
        expect_kind("check_link: shape", shape, (), "the shape of a link, an object with `create` and `open`")
    shapes = {"a>b": shape, "b>a": shape}
    links = type(shape).create(shapes)
    other = type(shape).open(links.path, shapes)
    try:
        broken = [*_messages(links, other), *_beside(links)]
    finally:
        other.close()
        links.close()
    assert not broken, "\n".join(broken)


def _messages(links: Links, other: Links) -> list[str]:
    before_ns = time.monotonic_ns()
    passages = [links.reserve("a>b", size) for size in SIZES]
    found = [why for size, passage in zip(SIZES, passages, strict=True) for why in _one(size, passage, before_ns)]
    durations = [passage.end_ns - passage.start_ns for passage in passages]
    if durations != sorted(durations):
        found.append(f"messages of {SIZES} bytes are on the link for {durations} ns: a larger one for less")
    passages.append(other.reserve("a>b", SIZES[-1]))
    for earlier, later in pairwise(passages):
        if later.start_ns < earlier.end_ns:
            found.append(f"a message starts {earlier.end_ns - later.start_ns} ns before the one in front has left")
        if later.arrival_ns < earlier.arrival_ns:
            found.append("a message arrives before the one in front of it")
    back = links.reserve("b>a", 1)
    if back.start_ns >= passages[-1].end_ns > time.monotonic_ns():
        found.append("a message waits for those of the other direction")
    return found


def _one(size: int, passage: Passage, before_ns: int) -> list[str]:
    if before_ns <= passage.start_ns <= passage.end_ns <= passage.arrival_ns:
        return []
    return [f"a message of {size} bytes put there at {before_ns} ns has the times {tuple(passage)}"]


def _beside(links: Links) -> list[str]:
    data = links.reserve("a>b", 1_000_000_000)
    control = links.reserve_beside("a>b", 1)
    late = control.start_ns >= data.end_ns > time.monotonic_ns()
    return ["a control message waits for what is on the link"] if late else []
