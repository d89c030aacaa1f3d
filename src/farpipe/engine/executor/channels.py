"""Opens a run's channels before its first step: TCP may take longer to come up to the rate than a step takes."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from farpipe.engine.executor.executor import NOBODY, instructions
from farpipe.engine.run_spec import RunSpec, collectives_of
from farpipe.engine.transport import ChannelKind, Transport

MAX_ROUNDS: Final = 4
"""Channels on one link come up to the rate one after the other, for each of them is to have all of it; of more, several
at a time."""
ROUND_S: Final = 10.0
"""Longest wait for the channels of one round; what is slower goes on beside the first step."""

Route = tuple[int, int, ChannelKind]
"""Source and target process, and kind, of a channel."""


def open_channels(run: RunSpec, transport: Transport) -> None:
    """Open the channels of `run` that begin at this process, one after the other where they share a link."""
    for number, routes in enumerate(rounds(run)):
        for source, target, kind in routes:
            if source == transport.rank:
                transport.open(target, kind)
        transport.await_channels(ROUND_S)
        transport.exchange(f"channels {number}", b"", waiting_for="the others to open their channels")


def rounds(run: RunSpec) -> list[list[Route]]:
    """All channels of a step, in up to MAX_ROUNDS rounds: in each, as few on one link as may be."""
    links, on_link = run.links(), defaultdict[str, int](int)
    found: list[list[Route]] = [[]]
    for source, target, kind in dict.fromkeys([*_between_stages(run), *_between_replicas(run), *_between_ends(run)]):
        name = links.get((source, target), ("", None))[0]
        place = on_link[name] % MAX_ROUNDS if name else 0
        on_link[name] += 1
        found += [[] for _ in range(place + 1 - len(found))]
        found[place].append((source, target, kind))
    return found


def _between_stages(run: RunSpec) -> Iterator[Route]:
    places = run.places
    for process in range(places.num_processes):
        rank, *replica_and_twin = places.of(process)
        for item in instructions(run.plan.schedule, rank):
            if item.target not in (NOBODY, rank):
                yield process, places.process(item.target, *replica_and_twin), item.direction


def _between_replicas(run: RunSpec) -> Iterator[Route]:
    """Every process sends its sums to the next one of its rings."""
    for process in range(run.num_processes):
        if collectives_of(run, run.places.of(process).rank):
            for ring in run.places.ring_levels(process)[1 if run.is_divided else 0 :]:
                if len(ring) > 1:
                    yield process, ring[(ring.index(process) + 1) % len(ring)], "sync"


def _between_ends(run: RunSpec) -> Iterator[Route]:
    if run.ends is not None:
        for process in range(run.num_processes):
            rank, *replica_and_twin = run.places.of(process)
            if rank == run.ends.first_rank:
                other = run.places.process(run.ends.last_rank, *replica_and_twin)
                yield process, other, "sync"
                yield other, process, "sync"
