"""Why a candidate lost, and what a user should know about the one that won."""

from farpipe.plan.evaluate import Evaluated
from farpipe.problem import is_inter_site
from farpipe.spec import Job
from farpipe.units import format_bytes, format_rate, format_seconds


def breakdown_s(result: Evaluated) -> dict[str, float]:
    """The step taken apart, mean over ranks: computing, waiting between sites and inside, idle, overhead."""
    timeline = result.timeline
    inter_site_s, intra_site_s = map(float, timeline.exposed_s.mean(axis=0))
    busy_s = float(timeline.busy_s.mean())
    return {
        "computing": busy_s,
        "waiting for messages between sites": inter_site_s,
        "waiting for messages inside a site": intra_site_s,
        "idle in the pipeline": max(0.0, timeline.makespan_s - busy_s - inter_site_s - intra_site_s),
        "optimizer and other overhead": result.overhead_s,
    }


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
