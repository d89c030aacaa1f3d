"""Problems with one stage per rank, round robin or in a V, and what the papers measure of a schedule."""

from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer


def pipeline(
    num_ranks,
    num_microbatches,
    stages_per_rank=1,
    *,
    seconds=(1, 1, 1),
    memory=None,
    stash=0.0,
    cuts=(),
    latency=0.0,
    size=0.0,
    v_shape=False,
):
    """Equal stages, round robin or in a V; at the cuts one directed link of that latency and `size` seconds each way.

    `seconds` (F, I, W) and one unit of activation are those of a whole rank: its stages share them.
    """
    ring = [*range(num_ranks)]
    places = ring + ring[::-1] if v_shape else ring * stages_per_rank
    share = len(places) // num_ranks
    forward, inputs, weights = (s / share for s in seconds)
    figures = {"forward_s": forward, "input_grad_s": inputs, "weight_grad_s": weights}
    figures |= {"activation_bytes": 1 / share, "weight_stash_bytes": stash / share}
    links = {name: Link(latency_s=latency, bandwidth_bytes_per_s=1) for name in ("a>b", "b>a")}
    ways = [("b>a", "a>b") if s >= num_ranks and v_shape else ("a>b", "b>a") for s in range(len(places) - 1)]
    slow = [Hop(forward=Transfer(link=to, bytes=size), backward=Transfer(link=back, bytes=size)) for to, back in ways]
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(memory_bytes=memory),) * num_ranks,
        stages=tuple(Stage(rank=rank, **figures) for rank in places),
        links=links,
        hops=tuple(hop if s in cuts else None for s, hop in enumerate(slow)),
    )


def two_sites(num_ranks, num_microbatches, *, latency=0.0, size=0.0, v_shape=False, **options):
    """The pipeline cut in the middle; in a V the middle is crossed on the way up too."""
    cut = num_ranks // 2 - 1
    cuts = (cut, 2 * num_ranks - 2 - cut) if v_shape else (cut,)
    if not latency and not size:
        cuts = ()
    options |= {"latency": latency, "size": size, "v_shape": v_shape}
    return pipeline(num_ranks, num_microbatches, cuts=cuts, **options)


def longest_s(problem, schedule):
    """The longest time from the first to the last action of a rank: what the zero-bubble papers call the run time."""
    actions = simulate(problem, schedule).actions
    spans = [
        a["end_s"].max() - a["start_s"].min() for a in (actions[actions["rank"] == r] for r in range(problem.num_ranks))
    ]
    return max(spans)


def work_s(problem):
    """The most that any rank has to do."""
    durations = sum(problem.table(name).sum(axis=1) for name in ("forward_s", "input_grad_s", "weight_grad_s"))
    return max(durations[list(stages)].sum() for stages in problem.stages_of_rank)


def bubble_s(problem, schedule):
    """Idle time of the rank that takes longest."""
    return longest_s(problem, schedule) - work_s(problem)
