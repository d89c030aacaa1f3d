"""Lower bounds: no schedule of a Problem can be faster. Each with the sketch of its proof."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farpipe.core.step import Collective, Problem, headroom_bytes, num_fitting

ROUNDING: Final = 1e-12


def lower_bound_s(problem: Problem, enough_s: float = math.inf) -> float:
    """The largest of the bounds below, seconds; a hair less, for sums in another order round differently.

    With `enough_s` what takes longest is left out as soon as the others reach that. Those that know of actions only are
    for a step whose stages open at once (`farpipe.core.step.StepTraffic.opens_s`).
    """
    if known := problem.kept(_whole_bound_s):
        return known[0]
    of_actions = max(*busiest_rank_bounds_s(problem), critical_path_s(problem)) + float(problem.traffic.opens_s.min())
    bound_s = float(max(of_actions, link_work_s(problem)) * (1 - ROUNDING))
    if bound_s < enough_s:
        bound_s = float(max(bound_s, relaxation_s(problem, enough_s * (1 + ROUNDING)) * (1 - ROUNDING)))
        if bound_s < enough_s:  # nothing was left out
            known.append(bound_s)
    return bound_s


def _whole_bound_s(problem: Problem) -> list[float]:
    """The bound of a step once it is known."""
    return []


def period_bound_s(problem: Problem) -> float:
    """A lower bound of `Player.period_s`, seconds: the time from one step to the next without a barrier.

    Every rank and every link has all its work in each step, and the first stage's rank, which begins with a step's
    first forward, ends with its last weight gradient. Between a rank's last input gradient and its next step's first
    forward lie the way back to the first stage and the way forth again: in that time it has only those weight gradients
    left that its memory could keep waiting, and else nothing to do.
    """
    busy_s = problem.kept(_link_times_s)[0][:-1]
    return float(max(_turning_s(problem), busy_s.max(initial=0.0), critical_path_s(problem)) * (1 - ROUNDING))


def _turning_s(problem: Problem) -> float:
    """The longest of all ranks' work in a step with the wait between its last input gradient and its next forward."""
    stash, weights = problem.table("weight_stash_bytes"), problem.table("weight_grad_s")
    stage_s = (problem.table("forward_s") + problem.table("input_grad_s") + weights).sum(axis=1)
    head, tail, room = first_starts_s(problem), _tails_s(problem), headroom_bytes(problem)
    found = [0.0]
    for rank, mine in enumerate(map(list, problem.stages_of_rank)):
        if mine:
            least = float(stash[mine].min())
            most = num_fitting(float(room[rank]), least) if least > 0 and math.isfinite(room[rank]) else math.inf
            left_s = min(most, stash[mine].size) * float(weights[mine].max())
            wait_s = float(head[mine].min()) + float(tail[mine].min())
            found.append(float(stage_s[mine].sum()) + max(0.0, wait_s - left_s))
    return max(found)


def busiest_rank_bounds_s(problem: Problem) -> tuple[float, float]:
    """The largest of `rank_bounds_s`."""
    everything, without_weights = zip(*problem.kept(rank_bounds_s), strict=True)
    return max(everything), max(without_weights)


def rank_bounds_s(problem: Problem) -> list[tuple[float, float]]:
    """Of every rank with stages: it can't begin before its first input, and does one thing at a time.

    With all its work: it ends no earlier than head + F + I + W of everything it has. Without W: after its last I or B
    the gradient still has to go back through all earlier stages, however W is postponed: head + F + I + tail.
    """
    forward, inputs, weights = (problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    head, tail = first_starts_s(problem), _tails_s(problem)
    figures = (head, tail, (forward + inputs).sum(axis=1), weights.sum(axis=1))
    of_stages: list[tuple[float, ...]] = [*zip(*(figure.tolist() for figure in figures), strict=True)]
    found = []
    for mine in filter(None, problem.stages_of_rank):
        heads, tails, work, weights_s = zip(*[of_stages[stage] for stage in mine], strict=True)
        until_s = min(heads) + _sum(work)
        found.append((until_s + _sum(weights_s), until_s + min(tails)))
    return found


def _sum(figures: tuple[float, ...]) -> float:
    """The sum of figures of a rank's stages, mostly one or two; as numpy rounds it."""
    return sum(figures) if len(figures) <= 2 else float(np.sum(figures))


def critical_path_s(problem: Problem) -> float:
    """One sequence through all stages and back, with every message alone on its link, and the W of stage 0.

    Of a chain the slices follow each other on every stage, backwards in reverse.
    """
    forward, inputs, weights = (problem.table(name) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    forth_s, back_s = problem.traffic.messages.arrives_after_s
    if problem.is_uniform:
        return _alone_s(*(table[:, 0].tolist() for table in (forward, inputs, weights, forth_s, back_s)))
    chains, done = problem.chains, np.zeros(problem.num_microbatches)
    for stage in range(problem.num_stages):
        there = done + forth_s[stage - 1] if stage else done
        done = _one_by_one(there, forward[stage], chains.previous, range(problem.num_microbatches))
    for stage in reversed(range(problem.num_stages)):
        there = done + back_s[stage + 1] if stage + 1 < problem.num_stages else done
        done = _one_by_one(there, inputs[stage], chains.next, reversed(range(problem.num_microbatches)))
    return float((done + weights[0]).max())


def _alone_s(
    forward: list[float], inputs: list[float], weights: list[float], forth_s: list[float], back_s: list[float]
) -> float:
    """`critical_path_s` where all microbatches are alike: any one of them."""
    done = forward[0]
    for stage in range(1, len(forward)):
        done = done + forth_s[stage - 1] + forward[stage]
    done += inputs[-1]
    for stage in reversed(range(len(forward) - 1)):
        done = done + back_s[stage + 1] + inputs[stage]
    return done + weights[0]


def _one_by_one(
    there: NDArray[np.float64], durations: NDArray[np.float64], before: NDArray[np.int64], sequence: Iterable[int]
) -> NDArray[np.float64]:
    """Earliest time at which every microbatch is done if it is `there` then, and after the slice `before` it."""
    done = there + durations
    if (before >= 0).any():
        for j in sequence:
            if before[j] >= 0:
                done[j] = max(there[j], done[before[j]]) + durations[j]
    return np.asarray(done)


def link_work_s(problem: Problem) -> float:
    """A link carries one message at a time: all that occupy it, but for the last one, which has only to arrive."""
    busy_s, after_s = problem.kept(_link_times_s)
    return float(np.where(np.isfinite(after_s), busy_s + after_s, 0.0).max())


def _link_times_s(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Occupied seconds of every link, and the least seconds from when it is free again until something is there,
    infinite where nothing takes it; with a last place for no link."""
    parts = (problem.traffic.messages, problem.traffic.collectives)
    link, occupies_s, arrives_after_s = (
        np.concatenate([getattr(part, name).ravel() for part in parts])
        for name in ("link", "occupies_s", "arrives_after_s")
    )
    used = link >= 0
    busy_s, after_s = np.zeros(len(problem.links) + 1), np.full(len(problem.links) + 1, np.inf)
    np.add.at(busy_s, link[used], occupies_s[used])
    np.minimum.at(after_s, link[used], (arrives_after_s - occupies_s)[used])
    return busy_s, after_s


def relaxation_s(problem: Problem, enough_s: float = math.inf) -> float:
    """Every rank and every link alone, given the earliest start and the least rest of all that it has to do.

    Number the actions of one stage and kind in the order in which they happen. Then the i-th F of a stage follows the
    i - 1 before it and, as i microbatches must have come through, the i-th F of the stage before; the i-th I likewise;
    and where K microbatches fit memory, the i-th F waits for the (i - K)-th release, whichever those are: that makes
    one round trip per K microbatches. So longest paths through these numbers (the least durations of any microbatch
    taken) bound every start, the same backwards in time every rest. Messages lie between: the i-th is there when the
    i-th F or I has ended, and its consumer's i-th action follows it. The best interruptible order of what one rank
    or link has to do between those bounds the step (Carlier's and Jackson's bound for one machine). The rest of them
    is left out once one of them, the busiest first, reaches `enough_s`.
    """
    from farpipe.core.schedule import bound_kernel  # here, for numba takes a third of a second to import

    durations, _, head, tail = _least_times_s(problem)
    work_s = durations.sum(axis=0) * problem.num_microbatches
    machines = [
        (float(work_s[list(stages)].sum()), partial(_rank_queues, head, tail, durations, stages))
        for stages in problem.stages_of_rank
        if stages
    ]
    busy_s, _ = problem.kept(_link_times_s)
    machines += [
        (float(busy_s[uses.link]), partial(_link_queues, problem, head, tail, durations, uses))
        for uses in _uses_of_links(problem)
    ]
    found_s = 0.0
    for _, queues in sorted(machines, key=itemgetter(0), reverse=True):
        found_s = max(found_s, float(bound_kernel.one_machine(*queues())))
        if found_s >= enough_s:
            break
    return found_s


def _least_times_s(problem: Problem) -> tuple[NDArray[np.float64], ...]:
    """(durations [3, S], travel [2, S], head [3, S, M], tail [3, S, M]) of `relaxation_s`.

    The least duration of F, I and W of any microbatch; the least travel of what a stage sends forward and backward; the
    earliest start of the i-th F, I and W, and the least that is left of the step when it ends.
    """
    from farpipe.core.schedule import bound_kernel  # here, for numba takes a third of a second to import

    names = ("forward_s", "input_grad_s", "weight_grad_s")
    durations = np.stack([problem.table(name).min(axis=1) for name in names])
    travel = problem.traffic.messages.arrives_after_s.min(axis=2)
    limits: tuple[Any, ...] = (_windows(problem), problem.num_microbatches)
    head = bound_kernel.heads(durations, travel, problem.traffic.opening.stage_s, *limits)
    tail = bound_kernel.tails(durations, travel, _ends_s(problem), *limits)
    return durations, travel, head, tail


def _ends_s(problem: Problem) -> NDArray[np.float64]:
    """[S]: how long the longest collective takes that waits for the stage's last backward."""
    collectives, found = problem.traffic.collectives, np.zeros(problem.num_stages)
    np.maximum.at(found, collectives.stage[collectives.begin[0] :], collectives.arrives_after_s[collectives.begin[0] :])
    return found


Floats = NDArray[np.float64]
Queues = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
"""Work of one rank or link, as `bound_kernel.one_machine` reads it: (head, tail, durations, count)."""
Row = tuple[Floats, Floats, float, int]
"""Work of a link: (head, tail, duration, count) of things alike."""


class _Uses(NamedTuple):
    """Uses of one link: hops (direction, stage) of which messages take it, and collectives with their places."""

    link: int
    hops: list[tuple[int, int]]
    collectives: list[tuple[int, Collective]]


def _uses_of_links(problem: Problem) -> Iterable[_Uses]:
    """Uses of every link that is used."""
    uses: dict[int, _Uses] = {}
    for kind, stage, link in _links_used(problem.traffic.messages.link[:, :, : 1 if problem.is_uniform else None]):
        uses.setdefault(link, _Uses(link, [], [])).hops.append((kind, stage))
    links = problem.traffic.collectives.link.tolist()
    for at, (one, link) in enumerate(zip(problem.collectives, links, strict=True)):
        uses.setdefault(link, _Uses(link, [], [])).collectives.append((at, one))
    return uses.values()


def _rank_queues(
    head: NDArray[np.float64], tail: NDArray[np.float64], durations: NDArray[np.float64], stages: tuple[int, ...]
) -> Queues:
    mine, size = list(stages), head.shape[2]
    rows = (head[:, mine].reshape(-1, size), tail[:, mine].reshape(-1, size), durations[:, mine].reshape(-1))
    return *rows, np.full(rows[2].size, size)


def _link_queues(problem: Problem, head: Floats, tail: Floats, durations: Floats, uses: _Uses) -> Queues:
    """Messages of all hops, and collectives, of one link."""
    rows = [_of_hop(problem, head, tail, durations, uses.link, *hop) for hop in uses.hops]
    rows += [_of_collective(problem, head, tail, durations, *one) for one in uses.collectives]
    heads, tails, times, counts = zip(*rows, strict=True)
    return np.stack(heads), np.stack(tails), np.array(times), np.array(counts)


def _of_hop(problem: Problem, head: Floats, tail: Floats, durations: Floats, link: int, kind: int, source: int) -> Row:
    """Messages of a hop over `link`.

    Where only n of a hop's messages take it, the i-th of them is at least the i-th of all, and the i-th from the end at
    most that.
    """
    last, messages, target = problem.num_microbatches, problem.traffic.messages, source + 1 - 2 * kind
    if problem.is_uniform:
        occupies = float(messages.occupies_s[kind, source, 0])
        after_s = float(messages.arrives_after_s[kind, source, 0]) - occupies
        rest = tail[kind, target] + after_s + durations[kind, target]
        return head[kind, source] + durations[kind, source], rest, occupies, last
    chosen = messages.link[kind, source] == link
    occupies_s, count = messages.occupies_s[kind, source][chosen], int(chosen.sum())
    after_s = float((messages.arrives_after_s[kind, source][chosen] - occupies_s).min())
    ready = head[kind, source] + durations[kind, source]
    rest = tail[kind, target] + after_s + durations[kind, target]
    rest = np.concatenate((rest[last - count :], rest[: last - count]))
    return ready, rest, float(occupies_s.min()), count


def _of_collective(problem: Problem, head: Floats, tail: Floats, durations: Floats, at: int, one: Collective) -> Row:
    collectives, everything = problem.traffic.collectives, np.ones(head.shape[2])
    occupies_s = float(collectives.occupies_s[at])
    ready_s = 0.0 if one.after is None else head[2, one.after, -1] + durations[2, one.after]
    rest_s = float(collectives.arrives_after_s[at]) - occupies_s
    if one.before is not None:
        rest_s += problem.traffic.opens_s[one.before] + durations[0, one.before] + tail[0, one.before, 0]
    return everything * ready_s, everything * rest_s, occupies_s, 1


def _windows(problem: Problem) -> NDArray[np.int64]:
    """[3, S]: at most how many microbatches fit between F and the end of I, between F and the end of W, and together
    with those of the rank's earlier stages between F and the end of I.

    The last: when a stage starts its i-th F, its rank's earlier stages have started as many. If all of them had
    released fewer than i - K, more than K would be held in each; and who has released most has done no more I's than
    this stage, from which its gradients come.
    """
    most = np.full((3, problem.num_stages), problem.num_microbatches, np.int64)
    held = problem.table("activation_bytes").min(axis=1)
    kept = np.minimum(held, problem.table("weight_stash_bytes").min(axis=1))
    headroom = headroom_bytes(problem).tolist()
    for index, stage in enumerate(problem.stages):
        earlier = [s for s in problem.stages_of_rank[stage.rank] if s <= index]
        for row, size in enumerate((held[index], kept[index], held[earlier].sum())):
            if headroom[stage.rank] < size * problem.num_microbatches:
                most[row, index] = max(1, num_fitting(headroom[stage.rank], size))
    return most


def _links_used(link: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
    """(direction, stage, link) of all messages [2, S, M], each once."""
    for kind, stage in np.argwhere(link.max(axis=2) >= 0).tolist():
        yield from ((kind, stage, name) for name in np.unique(link[kind, stage]).tolist())


def first_starts_s(problem: Problem) -> NDArray[np.float64]:
    """Per stage the earliest that any forward can start: [num_stages]."""
    forward = problem.table("forward_s")
    if problem.is_uniform:
        forth_s, first = problem.traffic.messages.arrives_after_s[0, :, 0].tolist(), forward[:, 0].tolist()
        return np.array(
            [*accumulate(range(problem.num_stages - 1), lambda s, i: s + first[i] + forth_s[i], initial=0.0)]
        )
    reach = np.zeros((problem.num_stages, problem.num_microbatches))
    for index in range(problem.num_stages - 1):
        reach[index + 1] = reach[index] + forward[index] + problem.traffic.messages.arrives_after_s[0, index]
    return np.asarray(reach.min(axis=1))


def _tails_s(problem: Problem) -> NDArray[np.float64]:
    """Per stage the least time from the end of any I to the end of the step: [num_stages]."""
    inputs, weights = problem.table("input_grad_s"), problem.table("weight_grad_s")
    if problem.is_uniform:
        back_s, first = problem.traffic.messages.arrives_after_s[1, :, 0].tolist(), inputs[:, 0].tolist()
        begin = float(weights[0, 0])
        later = range(1, problem.num_stages)
        return np.array([*accumulate(later, lambda s, i: s + first[i - 1] + back_s[i], initial=begin)])
    rest = np.zeros((problem.num_stages, problem.num_microbatches))
    rest[0] = weights[0]
    for index in range(1, problem.num_stages):
        rest[index] = rest[index - 1] + inputs[index - 1] + problem.traffic.messages.arrives_after_s[1, index]
    return np.asarray(rest.min(axis=1))
