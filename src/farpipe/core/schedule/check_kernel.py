"""The compiled part of `check`: whether large orders keep rules 2 to 5, without saying which they break."""

import numpy as np

from farpipe.core.step.codes import F, I, W
from farpipe.core.step.inlined import arrival_of, direction_of, kind_of, message_of, next_stage, slot_of
from farpipe.core.step.jit import jit

_FORWARD, _INPUT_GRAD, _WEIGHT_GRAD, _BACKWARD = 1, 2, 4, 8
"""Bits of what is done for one stage and microbatch. Complete are F and B, and F and I and W."""


@jit
def all_sound(codes, begin, rank_of_stage, previous, following):  # type: ignore[no-untyped-def]
    """Play all ranks' orders, as a Schedule has them, without times until nothing moves.

    `previous` and `following` [M]: the slices before and after of the same sequence, -1 for none.
    Sound if every action is played on its own rank at the right moment, and every microbatch is complete everywhere.
    """
    num_ranks, num_stages, num_microbatches = begin.size - 1, rank_of_stage.size, previous.size
    done = np.zeros((num_stages, num_microbatches), np.uint8)
    position, waiting = begin[:-1].copy(), np.full(2 * num_stages * num_microbatches, -1, np.int32)
    stack, top = np.arange(num_ranks), num_ranks
    while top > 0:
        top -= 1
        rank = stack[top]
        while position[rank] < begin[rank + 1]:
            code = codes[position[rank]]
            slot, kind = slot_of(code), kind_of(code)
            stage = slot // num_microbatches
            microbatch = slot - stage * num_microbatches
            if not (0 <= stage < num_stages and rank_of_stage[stage] == rank):
                return False
            bit = _bit_in_turn(done[stage, microbatch], kind)
            if bit == 0:
                return False
            before = previous[microbatch] if kind == F else following[microbatch]
            if kind != W and before >= 0 and not _has_made(done[stage, before], kind):
                return False
            direction = direction_of(kind)
            source, message = next_stage(stage, 1 - direction), message_of(direction, slot, done.size)
            if kind != W and 0 <= source < num_stages and not _has_made(done[source, microbatch], kind):
                waiting[message] = rank
                break
            done[stage, microbatch] |= bit
            position[rank] += 1
            if kind != W and 0 <= next_stage(stage, direction) < num_stages:
                there = arrival_of(message, direction, num_microbatches)
                if waiting[there] >= 0:
                    stack[top], top = waiting[there], top + 1
                    waiting[there] = -1
    return _all_complete(position, begin, done)


@jit(inline="always")
def _all_complete(position, begin, done):  # type: ignore[no-untyped-def]
    """True if every order was played to its end, and all stages have done F and B, or F and I and W, of everything."""
    for rank in range(position.size):
        if position[rank] != begin[rank + 1]:
            return False
    split, joined = _FORWARD | _INPUT_GRAD | _WEIGHT_GRAD, _FORWARD | _BACKWARD
    for stage in range(done.shape[0]):
        for microbatch in range(done.shape[1]):
            if done[stage, microbatch] != split and done[stage, microbatch] != joined:
                return False
    return True


@jit(inline="always")
def _bit_in_turn(done, kind):  # type: ignore[no-untyped-def]
    """The bit that the action adds to what is `done`, or 0 where it is not its turn (or was done before)."""
    if kind == F:
        return _FORWARD if done == 0 else 0
    if kind == W:
        return _WEIGHT_GRAD if done == _FORWARD | _INPUT_GRAD else 0
    if done != _FORWARD:
        return 0
    return _INPUT_GRAD if kind == I else _BACKWARD


@jit(inline="always")
def _has_made(done, kind):  # type: ignore[no-untyped-def]
    """True if a neighbour that has `done` this much has made what an action of this kind takes from it."""
    return (done & _FORWARD) != 0 if kind == F else (done & (_INPUT_GRAD | _BACKWARD)) != 0
