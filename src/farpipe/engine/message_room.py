"""Room for the messages of a run, so that no send waits for any: in buffers, and in page-locked memory where GPUs are.

A plan counts on sends that never wait. Buffers of a fixed size would break that where messages are long: after four of
64 MB in each direction the computing thread stood still, in the very warm-up that fills a long link.
"""

from collections import Counter
from typing import Final

from farpipe.core.step.ahead import Ahead, messages_ahead
from farpipe.engine.run_spec import RunSpec
from farpipe.planning.cost.transfer import wire_bytes

LEAST_BYTES: Final = 256 << 20
"""Buffers are never smaller: they hold other messages too, such as gradients of replicas."""
SPARE: Final = 1.25
"""Factor on the planned bytes, which are an estimate for modules of somebody's own."""


def ahead_of(run: RunSpec) -> Ahead:
    """Messages between stages that may wait at once; of a run whose orders may change, all of a step."""
    is_fixed = run.replan is None and run.chunk_costs is None
    return messages_ahead(run.plan.problem, run.plan.schedule if is_fixed else None)


def buffer_bytes(run: RunSpec) -> int:
    """Room that every channel of the transport needs."""
    return max([LEAST_BYTES, *(_bytes(channel) for channel in ahead_of(run).values())])


def leaving_bytes(run: RunSpec, rank: int) -> int:
    """Room that all messages from `rank` of the pipeline need on their way to the transport."""
    return max(LEAST_BYTES, sum(_bytes(channel) for (source, *_), channel in ahead_of(run).items() if source == rank))


def _bytes(channel: list[tuple[int, float]]) -> int:
    return round(SPARE * sum(count * size for count, size in channel))


def page_locked_bytes(run: RunSpec) -> int:
    """Page-locked memory that the GPUs of one replica hold for messages, at their senders and at their receivers."""
    channels = ahead_of(run).values()
    return sum(2 * count * pooled_bytes(round(size)) for channel in channels for count, size in channel)


def pooled_bytes(num_bytes: int) -> int:
    """Memory that torch's pool of page-locked memory takes for so many bytes: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def message_sizes(run: RunSpec, process: int, num_elements: int, item_bytes: int, num_dimensions: int) -> Counter[int]:
    """Number of messages that may wait at `process`, by their bytes; of activations that are described by the rest."""
    assert run.plan.training is not None
    place, found = run.places.of(process), Counter[int]()
    sites = run.places.replicas[place.replica]
    for (source, target, _), channel in ahead_of(run).items():
        if place.rank in (source, target):
            wire_type = "none" if sites[source] == sites[target] else run.plan.training.wire_type
            found[wire_bytes(num_elements, item_bytes, wire_type, num_dimensions)] += sum(count for count, _ in channel)
    return found
