"""Codes of actions and places of messages: one number each in arrays and compiled loops.

A *slot* is ``stage * M + microbatch``. An action's code is ``4 slot + kind``, the kind by its place in KINDS. A
message's place is ``direction * S * M + slot``; sent from the slot of the action that makes it, it arrives at the slot
of the one that uses it. The functions take numbers and arrays alike; compiled loops import them from `inlined`.
"""

from typing import Any, Final, TypeVar

from numpy.typing import NDArray

F, I, W, B = range(4)  # noqa: E741  the letters of the actions
NUM_KINDS: Final = 4
FORWARD, BACKWARD = range(2)
"""Directions: the first index of messages between stages."""

Number = TypeVar("Number", int, NDArray[Any])


def encode(kind: Number | int, slot: Number) -> Number:
    """Code of the action of this kind at this slot."""
    return 4 * slot + kind


def kind_of(code: Number) -> Number:
    """Kind of the action with this code: F, I, W or B."""
    return code & 3


def slot_of(code: Number) -> Number:
    """Slot of the action with this code."""
    return code >> 2


def cell_of(code: Number, num_microbatches: int) -> tuple[Number, Number]:
    """(stage, microbatch) of the action with this code."""
    return slot_of(code) // num_microbatches, slot_of(code) % num_microbatches


def direction_of(kind: Number) -> Number:
    """Direction of the message that an action of this kind uses, and of the one that it makes; a W has neither."""
    return 1 * (kind != F)  # type: ignore[no-any-return]


def message_of(direction: Number | int, slot: Number, num_slots: int) -> Number:
    """Place of the message of this direction at this slot, of `num_slots` = S * M."""
    return direction * num_slots + slot


def next_stage(stage: Number, direction: Number | int) -> Number:
    """Stage to which messages of this direction go; outside 0 to S - 1 there is none."""
    return stage + 1 - 2 * direction


def arrival_of(message: Number, direction: Number | int, num_microbatches: int) -> Number:
    """Place where the message sent from place `message` arrives; the same of slots."""
    return message + num_microbatches - 2 * direction * num_microbatches
