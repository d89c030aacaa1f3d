import numpy as np
import pytest

from farpipe.core.step import KINDS, Action, Schedule, awaited, handed_to
from farpipe.core.step import codes as plain
from farpipe.core.step.codes import B, F, I, W

NUM_STAGES, NUM_MICROBATCHES = 3, 5
EVERY = [(s, k, j) for s in range(NUM_STAGES) for k in (F, I, W, B) for j in range(NUM_MICROBATCHES)]


def code_of(stage, kind, microbatch):
    return plain.encode(kind, stage * NUM_MICROBATCHES + microbatch)


def test_kinds_are_places_among_the_letters():
    assert [KINDS[kind] for kind in (F, I, W, B)] == ["F", "I", "W", "B"]


def test_a_code_is_read_as_it_was_written():
    assert sorted(code_of(*cell) for cell in EVERY) == list(range(len(EVERY)))
    for stage, kind, microbatch in EVERY:
        code = code_of(stage, kind, microbatch)
        assert plain.kind_of(code) == kind
        assert plain.cell_of(code, NUM_MICROBATCHES) == (stage, microbatch)
        assert plain.slot_of(code) == stage * NUM_MICROBATCHES + microbatch


def test_schedules_write_these_codes():
    for stage, kind, microbatch in EVERY:
        schedule = Schedule(NUM_MICROBATCHES, [[Action(stage, KINDS[kind], microbatch)]])
        assert schedule.codes.tolist() == [code_of(stage, kind, microbatch)]


def test_a_message_arrives_where_its_user_looks_for_it():
    for stage, kind, microbatch in EVERY:
        action, direction = Action(stage, KINDS[kind], microbatch), plain.direction_of(kind)
        target = plain.next_stage(stage, direction)
        if kind == W or not 0 <= target < NUM_STAGES:
            assert handed_to(action, NUM_STAGES) is None
            continue
        assert handed_to(action, NUM_STAGES) == target
        size = NUM_STAGES * NUM_MICROBATCHES
        sent = plain.message_of(direction, stage * NUM_MICROBATCHES + microbatch, size)
        user = plain.message_of(direction, target * NUM_MICROBATCHES + microbatch, size)
        assert plain.arrival_of(sent, direction, NUM_MICROBATCHES) == user
        assert awaited(Action(target, KINDS[kind], microbatch), NUM_STAGES)[::2] == (stage, microbatch)


def test_arrays_and_compiled_loops_read_codes_alike():
    from numba import njit

    from farpipe.core.step import inlined

    @njit
    def figures(code):
        kind, slot = inlined.kind_of(code), inlined.slot_of(code)
        direction = inlined.direction_of(kind)
        message = inlined.message_of(direction, slot, 15)
        return kind, slot, direction, message, inlined.arrival_of(message, direction, 5), inlined.encode(kind, slot)

    codes = np.arange(len(EVERY), dtype=np.int32)
    kinds, slots = plain.kind_of(codes), plain.slot_of(codes)
    directions = plain.direction_of(kinds)
    messages = plain.message_of(directions, slots, 15)
    arrivals = plain.arrival_of(messages, directions, 5)
    rows = np.stack([kinds, slots, directions, messages, arrivals, plain.encode(kinds, slots)], axis=1)
    assert [figures(code) for code in codes.tolist()] == list(map(tuple, rows.tolist()))


@pytest.mark.parametrize("link", [0, -1, -2])
def test_a_link_carries_one_message_at_a_time(link):
    from farpipe.core.step.inlined import put

    free_s = np.zeros(1)
    starts = [put(link, ready_s, 2.0, free_s) for ready_s in (1.0, 1.5, 7.0)]
    assert starts == ([1.0, 3.0, 7.0] if link == 0 else [1.0, 1.5, 7.0])
    assert free_s[0] == (9.0 if link == 0 else 0.0)


def test_the_queue_of_a_link_in_arrays_is_that_of_compiled_loops():
    from farpipe.core.step.inlined import put
    from farpipe.core.step.links import free_again_s

    random = np.random.default_rng(0)
    ready_s, occupies_s, free_s = np.sort(random.uniform(0, 50, 40)), random.uniform(0, 2, 40), np.zeros(1)
    starts = [put(0, *pair, free_s) for pair in zip(ready_s.tolist(), occupies_s.tolist(), strict=True)]
    assert free_again_s(ready_s, occupies_s) == pytest.approx(np.add(starts, occupies_s))
