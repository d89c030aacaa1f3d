"""Opens a run's channels before its first step: TCP may take longer to come up to the rate than a step takes."""

from collections import defaultdict
from typing import Final

from farpipe.runtime.executor import NOBODY, lower
from farpipe.runtime.run_spec import RunSpec
from farpipe.transport import ChannelKind, Transport

MAX_ROUNDS: Final = 4
"""Channels on one link come up to the rate one after the other, for each of them is to have all of it; of more, several
at a time."""
ROUND_S: Final = 10.0
"""Longest wait for the channels of one round; what is slower goes on beside the first step."""

Route = tuple[int, int, ChannelKind]
"""Source and target process, and kind, of a channel."""


def open_channels(run: RunSpec, transport: Transport) -> None:
    """Open the channels between the stages of `run` that begin at this process, in turns where they share a link."""
    for number, routes in enumerate(rounds(run)):
        for source, target, kind in routes:
            if source == transport.rank:
                transport.open(target, kind)
        transport.await_channels(ROUND_S)
        transport.exchange(f"channels {number}", b"", waiting_for="the others to open their channels")


def rounds(run: RunSpec) -> list[list[Route]]:
    """All channels between stages, in up to MAX_ROUNDS rounds: in each, as few on one link as may be."""
    links, on_link = run.links(), defaultdict[str, int](int)
    found: list[list[Route]] = [[]]
    for source, target, kind in _routes(run):
        name = links.get((source, target), ("", None))[0]
        place = on_link[name] % MAX_ROUNDS if name else 0
        on_link[name] += 1
        found += [[] for _ in range(place + 1 - len(found))]
        found[place].append((source, target, kind))
    return found


def _routes(run: RunSpec) -> list[Route]:
    found: dict[Route, None] = {}
    for replica in range(run.num_replicas):
        for rank in range(run.places.num_ranks):
            for item in lower(run.schedule, rank):
                if item.target not in (NOBODY, rank):
                    ends = (run.places.process(rank, replica), run.places.process(item.target, replica))
                    found[(*ends, item.way)] = None
    return list(found)
