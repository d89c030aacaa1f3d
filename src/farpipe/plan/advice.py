"""Why a candidate lost, and what a user should know about the one that won."""

from farpipe.plan.evaluate import Evaluated
from farpipe.problem import Hop, Sync, Transfer, is_inter_site
from farpipe.simulate import simulate
from farpipe.spec import Job
from farpipe.units import format_bytes, format_rate, format_seconds


def breakdown_s(result: Evaluated) -> dict[str, float]:
    """The step taken apart: computing (mean over ranks), what links cost, idle in the pipeline, overhead.

    What links cost is how much faster the same order would be if they cost nothing: waits that one rank passes on to
    the next count where they come from, not as idle time of the next.
    """
    busy_s = float(result.timeline.busy_s.mean())
    near_s, free_s = (_without_links_s(result, keep_inside) for keep_inside in (True, False))
    return {
        "computing": busy_s,
        "for the links between sites": result.timeline.makespan_s - near_s,
        "for the links inside sites": near_s - free_s,
        "idle in the pipeline": free_s - busy_s,
        "for the optimizer and other overhead": result.overhead_s,
    }


def _without_links_s(result: Evaluated, keep_inside: bool) -> float:
    """The makespan of the same order if links (or only those between sites) cost nothing."""

    def stays(transfer: Transfer | None) -> Transfer | None:
        names = () if transfer is None else (transfer.link,) if isinstance(transfer.link, str) else transfer.link
        return transfer if keep_inside and not any(map(is_inter_site, names)) else None

    problem = result.problem
    hops = [hop and Hop(forward=stays(hop.forward), backward=stays(hop.backward)) for hop in problem.hops]
    sync = [s and Sync(gather=stays(s.gather), reduce=stays(s.reduce)) for s in problem.sync or ()]
    free = problem.model_copy(update={"hops": tuple(hops), "sync": tuple(sync) or None})
    return simulate(free, result.schedule, checked=True).makespan_s


def reason(best: Evaluated, other: Evaluated) -> str:
    """Why `other` is slower than `best`: where most of the difference is."""
    mine, theirs = breakdown_s(best), breakdown_s(other)
    name = max(mine, key=lambda part: theirs[part] - mine[part])
    percent = other.step_s / best.step_s - 1
    if percent < 0.0005:
        return "as fast; the first one found was taken"
    return f"{percent:+.1%}: {format_seconds(theirs[name] - mine[name])} more {name}"


def advice(job: Job, best: Evaluated, evaluated: list[Evaluated]) -> list[str]:
    """What to know before renting anything: whether more sites help, and which link is the wall."""
    return [*_second_site(best, evaluated), *_walls(best), *_traffic(job, best)]


def _second_site(best: Evaluated, evaluated: list[Evaluated]) -> list[str]:
    alone = [e for e in evaluated if len(e.candidate.order) == 1]
    if not alone:
        return []
    if len(best.candidate.order) == 1:
        several = [e for e in evaluated if len(e.candidate.order) > 1]
        if not several:
            return []
        other = several[0]
        order = " > ".join(other.candidate.order)
        return [
            f"A second site does not help: {order} would take {format_seconds(other.step_s)} a step, "
            f"{best.candidate.order[0]} alone takes {format_seconds(best.step_s)}."
        ]
    single = alone[0]
    gain = single.step_s / best.step_s
    more = best.candidate.num_devices / single.candidate.num_devices
    return [
        f"{len(best.candidate.order)} sites are {gain:.2f} times as fast as {single.candidate.order[0]} alone, with "
        f"{more:.2f} times its devices."
    ]


def _walls(best: Evaluated) -> list[str]:
    """Links that can't carry their messages while the slowest stage computes, and the rate that could."""
    timeline, found = best.timeline, []
    pace_s = float(timeline.busy_s.max()) / best.problem.num_microbatches
    for index, name in enumerate(timeline.links):
        mine = timeline.messages[timeline.messages["link"] == index]
        per_microbatch_s = float((mine["end_s"] - mine["start_s"]).sum()) / best.problem.num_microbatches
        if per_microbatch_s > pace_s and is_inter_site(name):
            needed = best.problem.links[name].bandwidth_bytes_per_s * per_microbatch_s / pace_s
            found.append(
                f"The link {name} is the wall: what one microbatch sends takes {format_seconds(per_microbatch_s)}, the "
                f"slowest rank computes only {format_seconds(pace_s)}; from {format_rate(needed)} on it would not be."
            )
    return found


def _traffic(job: Job, best: Evaluated) -> list[str]:
    if len(best.candidate.order) == 1:
        return []
    pipeline = sum(size for name, size in best.timeline.link_bytes().items() if is_inter_site(name))
    replicas = 4.0 * job.model.num_params
    relation = "less" if pipeline < replicas else "more"
    return [
        f"Pipelining sends {format_bytes(pipeline)} between sites in a step, {relation} than the "
        f"{format_bytes(replicas)} that one replica per site would have to exchange."
    ]
