"""Arrays that the compiled simulator of a pipeline over light paths reads and writes, by name.

M messages are counted by direction, stage of the producer and microbatch: 2 x stages x microbatches. Hops are counted
by direction and stage of the producer: 2 x stages.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.optical.paths import Table
from farpipe.optical.spectrum import Arrays, Heap

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Net(NamedTuple):
    """The network: its spectrum and candidate paths."""

    spectrum: Arrays
    table: Table
    first: NDArray[np.int32]
    """[pairs + 1]: the candidates of every pair."""
    per_slot: Floats
    """[paths]: Gbit/s that one slot carries."""
    latency_s: Floats
    """[paths]"""
    guard: int
    need: Ints
    """Scratch."""
    mask: NDArray[np.uint64]
    """Scratch."""


class Background(NamedTuple):
    """Requests that are no message's."""

    arrival_s: Floats
    pair: NDArray[np.int32]
    gbit_s: Floats
    holding_s: Floats
    per_slot: Floats
    """[paths]: as in Net, for these requests."""
    policy: tuple[int, int, Floats]
    path: NDArray[np.int32]
    """Written: the candidate that each took, -1 refused, -2 not yet there."""


class Orders(NamedTuple):
    """The orders of a schedule and the messages between its stages."""

    codes: NDArray[np.int32]
    begin: NDArray[np.int32]
    duration_s: Floats
    """[4 x stages x microbatches]"""
    rank_of_stage: NDArray[np.int32]
    pair_of_hop: Ints
    """[2 x stages]: the pair of nodes, or AT_ONCE or NOTHING."""
    gbit: Floats
    """[M]: size of each message."""
    num_stages: int
    num_microbatches: int


class Rule(NamedTuple):
    """Rules by which messages ask for light paths: see `transfers.TransferRule`."""

    want: Ints
    """[M]: most units of rate asked for."""
    least: Ints
    """[M]: fewest units taken."""
    priority: Ints
    """[M]: rank among the messages that wait; lower is served first."""
    policy: tuple[int, int, Floats]
    unit_gbit: float
    earliest: bool
    widen: bool
    setup_s: float
    release_s: float
    retry_s: float
    ahead: bool
    keep_s: float
    """Below zero: one light path per message."""
    one_at_a_time: bool


class Lights(NamedTuple):
    """The light paths there are, by place; `spare` holds the free places, the next one at its end."""

    path: Ints
    start: Ints
    width: Ints
    """Slots."""
    hop: Ints
    """Its owner: a hop, or -1: the background."""
    begun_s: Floats
    until_s: Floats
    """Time at which it ends; infinite: not known, or there is none."""
    entry: Ints
    """Its row in the log, or -1."""
    spare: Ints


class State(NamedTuple):
    """State that lasts from step to step."""

    events: Heap
    lights: Lights
    counters: Ints
    """Events posted; free places of `lights`; rows of `log` used; next background request; messages that wait;
    messages that may be widened; 1 if an event will let those that wait try again."""
    used: Floats
    """Slots x fibres x seconds that messages have held."""
    waiting: Ints
    """[M]: messages that wait for a light path, by priority, then in order of asking."""
    ahead: Ints
    """[hops]: scratch of a retry."""
    sending: Ints
    """[M]: messages that may be widened."""
    num_active: Ints
    """[hops]: light paths of each hop."""
    kept: Ints
    """[hops]: the light path that is kept, or -1."""
    kept_units: Ints
    wider: Ints
    """[hops]: the light path that is set up to replace the kept one, or -1."""
    kept_until_s: Floats
    """[hops]: time at which it will have sent all that it was given."""
    watched: Flags
    """[hops]: True if an event will check whether the kept light path is idle."""
    log: Floats
    """Rows (owner, path, first slot, slots, from, until); owner: a message, or -1 - background request."""


class Out(NamedTuple):
    """Events of one step; times are absolute, infinite where it did not happen."""

    action_s: Floats
    """[actions]: starts."""
    ready_s: Floats
    ask_s: Floats
    grant_s: Floats
    start_s: Floats
    end_s: Floats
    arrival_s: Floats
    units: Ints
    """[M]: units granted, over all blocks."""
    path: Ints
    """[M]: candidate of the first block."""
    refused: Flags
    """[M]: refused when it asked first."""
    held: Ints
    """[MAX_BLOCKS, M]: light paths held, or -1."""
    block_units: Ints
    """[MAX_BLOCKS, M]: units of each."""
    there: Flags
    """[M by consumer]: True if the input is there."""
    position: Ints
    """[ranks]"""
    running: Flags
    """[ranks]"""


NUM_COUNTERS = 7
POSTED, SPARE, LOGGED, NEXT, WAITING, SENDING, RETRYING = range(NUM_COUNTERS)
NOTHING, AT_ONCE = -2, -1
