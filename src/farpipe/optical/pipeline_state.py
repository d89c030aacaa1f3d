"""Arrays that the compiled simulator of a pipeline over light paths reads and writes, by name.

M messages are counted by direction, stage of the producer and microbatch: 2 x stages x microbatches. Hops are counted
by direction and stage of the producer: 2 x stages.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.optical.spectrum import Arrays, Heap, Table

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
    priced_s: Floats
    """[paths]: latency and the price of the spectrum that a message takes there, to choose by."""
    guard: int
    need: Ints
    """Scratch."""
    wide: Ints
    """Scratch: [2, candidates of a pair]."""
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
    """Rules by which messages ask for light paths."""

    want: Ints
    """[M]: most units of rate asked for."""
    least: Ints
    """[M]: fewest units taken."""
    priority: Ints
    """[M]: rank among the messages that wait; lower is served first."""
    ask_s: Floats
    """[M]: time to ask, from the start of the step; infinite: see `ahead`."""
    policy: tuple[int, int, Floats]
    unit_gbit: float
    """Rate of one unit."""
    earliest: bool
    """Take the candidate over which the message arrives first, instead of the first one with the widest block."""
    spread: bool
    """The same, and the blocks of a message may be on different candidates."""
    patient: bool
    """Wait for a light path that is known to end if the message arrives sooner so."""
    book: bool
    """Book what will be free then."""
    move: bool
    """Move a message that is being sent to better blocks whenever a light path ends."""
    widen: bool
    """Add a block to a message that is being sent whenever a light path ends."""
    max_blocks: int
    """Light paths of one message side by side."""
    setup_s: float
    ahead: bool
    """Ask `setup_s` before the producer ends, at its start at the earliest."""
    keep_s: float
    """For how long without use a hop's light path is kept for its next message; below zero: one per message."""
    one_at_a_time: bool
    """A hop has one light path at a time."""


class Lights(NamedTuple):
    """The light paths that are lit, by place; `spare` holds the free places, the next one at its end."""

    path: Ints
    start: Ints
    width: Ints
    """Slots."""
    hop: Ints
    """Its owner: a hop, or -1: the background."""
    begun_s: Floats
    until_s: Floats
    """Time at which it ends; infinite: not known, or not lit."""
    booked: Ints
    """The message that has booked what it leaves, or -1."""
    entry: Ints
    """Its row in the log, or -1."""
    spare: Ints


class State(NamedTuple):
    """State that lasts from step to step."""

    events: Heap
    lights: Lights
    counters: Ints
    """Events posted; free places of `lights`; rows of `log` used; next background request; messages that wait;
    messages that may be widened."""
    used: Floats
    """Slots x fibres x seconds that messages have held."""
    waiting: Ints
    """[M]: messages that wait for a light path, by priority, then in order of asking."""
    sending: Ints
    """[M]: messages that may be widened."""
    lit: Ints
    """[hops]: light paths that each hop holds."""
    kept: Ints
    """[hops]: the light path that is kept, or -1."""
    kept_units: Ints
    kept_until_s: Floats
    """[hops]: time at which it will have sent all that it was given."""
    watched: Flags
    """[hops]: True if an event will check whether the kept light path is idle."""
    booked: Ints
    """[M]: the light path whose end a booking waits for, or -1."""
    booked_path: Ints
    """[M]: the candidate of the booking."""
    booked_s: Floats
    """[M]: time of the booking."""
    held: NDArray[np.uint64]
    """[M, fibres of a path, words]: slots that a booking holds."""
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


NUM_COUNTERS = 6
POSTED, SPARE, LOGGED, NEXT, WAITING, SENDING = range(NUM_COUNTERS)
NOTHING, AT_ONCE = -2, -1
