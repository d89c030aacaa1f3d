"""The compiled loop of list scheduling; `list_scheduling` says what its arguments mean.

Time moves forward: of all ranks the one that can start something first starts it. Which action a rank would start next
is kept, and looked at again only when the rank has done something or a message for it has been sent.
"""

import numpy as np

from farpipe.core.step.codes import F, I, W
from farpipe.core.step.inlined import encode, lacks, level_after, next_stage, put
from farpipe.core.step.jit import inner, jit

_NEVER = np.inf


@jit(inline="always")
def _fits_before(start, seconds, fit, other):  # type: ignore[no-untyped-def]
    """True if an action started at `start` is, but for a share of it, done when a preferred one can start."""
    return start < other and start + fit * seconds <= other + 1e-12


@jit(inline="always")
def _goes_first(one, other, warm_up_fit):  # type: ignore[no-untyped-def]
    """True if `one` pass goes before the `other`: the one with the lesser key, unless the other fits before it.

    Of each: start, seconds, True for a forward before the first input gradient, of which a share has to fit; key.
    """
    if one[3] < other[3]:
        return not _fits_before(other[0], other[1], warm_up_fit if other[2] else 0.0, one[0])
    return _fits_before(one[0], one[1], warm_up_fit if one[2] else 0.0, other[0])


@jit(inline="always")
def _next_pass(rank, stages, step, sequence, state, key, rules):  # type: ignore[no-untyped-def]  # noqa: C901
    """The F or I that the rank would do next: (start, kind, stage, whether something lacks memory)."""
    duration, taken, _, reserve, headroom = step
    backwards, needed, left_to_chains = sequence
    done, arrival, free, used, last, held = state
    strict, alternate, warm_up_fit, reserved, most, most_held = rules
    start, kind, stage, blocked = _NEVER, -1, -1, False
    best_key, best_seconds, best_is_first = _NEVER, 0.0, False
    for s in stages:
        if s < 0:
            break
        for k in range(2):
            count = done[k, s]  # no function of its own: that makes the whole loop half as fast
            if count == backwards.size:
                continue
            j = count if k == F else backwards[count]
            if k == I and j >= done[F, s]:
                continue
            at = max(free[rank], arrival[k, s, j])
            if k == F and (count - done[W, s] >= most[s] or held[rank] >= most_held):
                blocked, at = True, _NEVER
            spare = 0.0
            if k == F and not strict and j >= needed[done[I, s]]:
                spare = reserved * reserve[s] + left_to_chains[rank]
            if at < _NEVER and lacks(used[rank], taken[s, j, k], spare, headroom[rank]):
                blocked, at = True, _NEVER
            its_key = key[k, s, j]
            if alternate and k == last[rank]:
                its_key += 1e12
            is_first = k == F and done[I, s] == 0
            seconds = duration[k, s, j]
            if strict:
                better = its_key < best_key
            elif at == _NEVER:
                better = False
            else:
                mine, others = (at, seconds, is_first, its_key), (start, best_seconds, best_is_first, best_key)
                better = _goes_first(mine, others, warm_up_fit)
            if better:
                start, kind, stage = at, k, s
                best_key, best_seconds, best_is_first = its_key, seconds, is_first
    return start, kind, stage, blocked


@jit(inline="always")
def _next_weights(stages, done):  # type: ignore[no-untyped-def]
    """The stage with the oldest W that is left, or -1."""
    found = -1
    for s in stages:
        if s < 0:
            break
        if done[W, s] < done[I, s] and (found < 0 or done[W, s] < done[W, found]):
            found = s
    return found


@jit(inline="always")
def _next_action(rank, stages, step, sequence, state, idle, longest_idle, key, rules, weight_fit):  # type: ignore[no-untyped-def]
    """(start, kind, stage) of what the rank would do next; a start of infinity: nothing yet."""
    done, free = state[0], state[2]
    start, kind, stage, blocked = _next_pass(rank, stages, step, sequence, state, key, rules)
    of = _next_weights(stages, done)
    now = free[rank]
    if of < 0 or start <= now:
        return start, kind, stage
    # A W fills the gap before the next pass if all but a share of it fits there: what it delays is then less than
    # what it fills. It goes first whatever it delays where memory stops a pass, because only a W gives memory back,
    # and where this rank would come to have idled longest of all: the rank that idles longest is the one that ends
    # last.
    seconds, late = step[0][W, of, sequence[0][done[W, of]]], idle[rank] + start - now > longest_idle + 1e-12
    if blocked or late or _fits_before(now, seconds, weight_fit, start):
        return now, W, of
    return start, kind, stage


@jit(inline="always")
def send(kind, stage, j, end, arrival, wires, link_free):  # type: ignore[no-untyped-def]
    """Send the message of an F or I; the stage that gets it, or -1."""
    link, occupies_s, arrives_after_s, _ = wires
    target = next_stage(stage, kind)  # F and I are the directions of their messages
    if target == arrival.shape[1]:
        arrival[I, stage, j] = end
        return stage
    if target >= 0:
        start = put(link[kind, stage, j], end, occupies_s[kind, stage, j], link_free)
        arrival[kind, target, j] = start + arrives_after_s[kind, stage, j]
    return target


@jit(inline="always")
def _work_s(duration, stage):  # type: ignore[no-untyped-def]
    """Seconds of all actions of a stage; loops, for `sum` and `max` of arrays take half a second to compile."""
    work_s = 0.0
    for k in range(duration.shape[0]):
        for j in range(duration.shape[2]):
            work_s += duration[k, stage, j]
    return work_s


@jit(inline="always")
def _ends(free, began):  # type: ignore[no-untyped-def]
    """The end of the last rank, and the longest time of any."""
    last_s, longest_s = free[0], free[0] - began[0]
    for rank in range(1, free.size):
        last_s, longest_s = max(last_s, free[rank]), max(longest_s, free[rank] - began[rank])
    return last_s, longest_s


@jit
def play(  # type: ignore[no-untyped-def]
    stages_of_rank, rank_of_stage, step, sequence, wires, key, rules, weight_fit, codes, limit_s
):
    """Write the actions into `codes` as they start; (how many there are, makespan, longest time of any rank).

    Fewer than there is room for: no rank can start anything any more, or one can't be done before `limit_s`.
    """
    duration = step[0]
    num_stages, num_microbatches = duration.shape[1:]
    num_ranks = stages_of_rank.shape[0]
    done = np.zeros((3, num_stages), np.int64)
    arrival = np.full((2, num_stages, num_microbatches), _NEVER)
    arrival[F, 0] = 0.0
    free, used, idle = np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks)
    last, held, began = np.full(num_ranks, -1), np.zeros(num_ranks, np.int64), np.full(num_ranks, -1.0)
    left = np.zeros(num_ranks)
    for s in range(num_stages):
        left[rank_of_stage[s]] += _work_s(duration, s)
    state = (done, arrival, free, used, last, held)
    clocks = (idle, began, left, np.zeros(wires[3]))
    choices = (np.full(num_ranks, _NEVER), np.full((num_ranks, 2), -1), np.arange(num_ranks))
    places, choosing = (stages_of_rank, rank_of_stage), (key, rules, weight_fit)
    count = _fill(codes, places, step, sequence, wires, choosing, state, clocks, choices, limit_s)
    if count < codes.size:
        return count, _NEVER, _NEVER
    last_s, longest_s = _ends(free, began)
    return count, last_s, longest_s


@inner
def _fill(codes, places, step, sequence, wires, choosing, state, clocks, choices, limit_s):  # type: ignore[no-untyped-def]
    """Write the actions into `codes`; how many there are."""
    stages_of_rank, rank_of_stage = places
    key, rules, weight_fit = choosing
    duration, taken, freed = step[0], step[1], step[2]
    num_ranks, num_microbatches = stages_of_rank.shape[0], duration.shape[2]
    done, arrival, free, used, last, held = state
    idle, began, left, link_free = clocks
    start, choice, stale = choices
    # Of all ranks only two can have got another next action by one action: the one that did it, and the one that its
    # message goes to. All others keep theirs, so a turn costs a comparison per rank and not a choice.
    num_stale, longest_idle = num_ranks, 0.0
    for count in range(codes.size):
        for r in stale[:num_stale]:  # in one place: what is inlined twice takes twice as long to compile
            start[r], choice[r, 0], choice[r, 1] = _next_action(
                r, stages_of_rank[r], step, sequence, state, idle, longest_idle, key, rules, weight_fit
            )
        rank = 0
        for r in range(1, num_ranks):
            if start[r] < start[rank]:
                rank = r
        if start[rank] == _NEVER or start[rank] + left[rank] > limit_s:
            return count
        kind, stage = choice[rank]
        j = done[kind, stage] if kind == F else sequence[0][done[kind, stage]]
        done[kind, stage] += 1
        codes[count] = encode(kind, stage * num_microbatches + j)
        end = start[rank] + duration[kind, stage, j]
        if began[rank] < 0:
            began[rank] = start[rank]
        else:
            idle[rank] += start[rank] - free[rank]
            longest_idle = max(longest_idle, idle[rank])
        free[rank] = end
        left[rank] -= duration[kind, stage, j]
        consumer = -1
        used[rank] = level_after(used[rank], taken[stage, j, kind], freed[stage, j, kind])
        held[rank] += int(kind == F) - int(kind == W)
        if kind != W:
            last[rank] = kind
            consumer = send(kind, stage, j, end, arrival, wires, link_free)
        stale[0], num_stale = rank, 1
        if consumer >= 0 and rank_of_stage[consumer] != rank:
            stale[1], num_stale = rank_of_stage[consumer], 2
    return codes.size
