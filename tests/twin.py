"""The simulator's slow twin: the meaning of a Timeline event by event, in plain Python, with nothing clever.

It repeats two rules until nothing changes. (1) A rank whose next action has its input does it. (2) When no rank can
do anything, the earliest pending message (ties: lower stage, then lower microbatch, then collectives) takes its link.
"""

from farpipe.core.step import Problem, Schedule


def crossings(problem: Problem):
    """(link, seconds) of every message."""
    for index, hop in enumerate(problem.hops):
        between = problem.stages[index].rank != problem.stages[index + 1].rank
        for transfer in (hop.forward, hop.backward) if hop and between else ():
            for j in range(problem.num_microbatches) if transfer else ():
                name = transfer.link if isinstance(transfer.link, str) else transfer.link[j]
                yield name, times(problem, transfer, j)[0]


def times(problem: Problem, transfer, j):
    """(seconds on the link without the other replicas, seconds until the arrival) of one message."""
    link = problem.links[transfer.link if isinstance(transfer.link, str) else transfer.link[j]]
    crossing = problem.row(transfer.bytes)[j] / link.bandwidth_bytes_per_s
    own = crossing if transfer.occupies_s is None else problem.row(transfer.occupies_s)[j]
    there = crossing + link.latency_s if transfer.arrives_after_s is None else problem.row(transfer.arrives_after_s)[j]
    return own, there


def play_slowly(problem: Problem, schedule: Schedule):
    """({action: (start, end)}, {(kind, stage, microbatch): (ready, start, end, arrival)})."""
    num_stages, num_microbatches = problem.num_stages, problem.num_microbatches
    rank_of = [stage.rank for stage in problem.stages]
    link_free = dict.fromkeys(problem.links, 0.0)
    actions, messages, pending = {}, {}, []
    position, free = [0] * problem.num_ranks, [0.0] * problem.num_ranks
    longest = max(
        (seconds for name, seconds in crossings(problem) if problem.links[name].num_staggered > 1), default=0.0
    )
    others = {name: (link.num_staggered - 1) * longest for name, link in problem.links.items()}
    begin = max(others.values(), default=0.0)
    arrival = {("forward", 0, j): begin for j in range(num_microbatches)}
    arrival |= {("backward", num_stages - 1, j): begin for j in range(num_microbatches)}
    gate = [0.0] * num_stages
    left = [num_microbatches] * num_stages

    def seconds(stage, kind, j):
        spec = problem.stages[stage]
        forward, inputs, weights = (problem.row(f)[j] for f in (spec.forward_s, spec.input_grad_s, spec.weight_grad_s))
        return {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}[kind]

    def travel(transfer, ready, j):
        """(start, end, arrival) of a message on its link, which is then taken."""
        if transfer is None:
            return ready, ready, ready
        name = transfer.link if isinstance(transfer.link, str) else transfer.link[j]
        start, (own, there) = max(ready, link_free[name]), times(problem, transfer, j)
        link_free[name] = start + own + others[name]
        return start, start + min(own, there), start + there

    def deliver(kind, stage, j, ready, transfer):
        start, end, there = travel(transfer, ready, j)
        messages[kind, stage, j] = (ready, start, end, there)
        if kind in ("forward", "backward"):
            arrival[kind, stage + (1 if kind == "forward" else -1), j] = there
        return there

    def send(kind, stage, j, ready):
        target = stage + (1 if kind == "forward" else -1)
        if not 0 <= target < num_stages:
            return
        hop = problem.hops[min(stage, target)]
        transfer = getattr(hop, kind) if hop and rank_of[stage] != rank_of[target] else None
        if transfer is None:
            deliver(kind, stage, j, ready, None)
        else:
            pending.append((ready, stage, j, kind, transfer))

    def step(rank):
        """Do the rank's next action if its input is there."""
        if position[rank] == len(schedule.ranks[rank]):
            return False
        action = schedule.ranks[rank][position[rank]]
        stage, kind, j = action
        start = free[rank]
        if kind != "W":
            need = ("forward" if kind == "F" else "backward", stage, j)
            if need not in arrival:
                return False
            start = max(start, arrival[need])
        if kind == "F":
            start = max(start, gate[stage])
        end = start + seconds(stage, kind, j)
        actions[action], free[rank] = (start, end), end
        position[rank] += 1
        if kind != "W":
            send("forward" if kind == "F" else "backward", stage, j, end)
        if kind in "WB":
            left[stage] -= 1
            if left[stage] == 0 and problem.sync and problem.sync[stage] and problem.sync[stage].reduce:
                pending.append((end, stage, num_microbatches, "reduce", problem.sync[stage].reduce))
            for place, exchange in enumerate(problem.exchanges if left[stage] == 0 else ()):
                if exchange.source_stage == stage:
                    pending.append((end, stage, num_microbatches + 1 + place, "exchange", exchange))
        return True

    for stage, sync in enumerate(problem.sync or ()):
        if sync is not None and sync.gather is not None:
            gate[stage] = deliver("gather", stage, 0, 0.0, sync.gather) + begin
    while True:
        if any(step(rank) for rank in range(problem.num_ranks)):
            continue
        if not pending:
            return actions, messages
        first = min(pending, key=lambda message: message[:3])
        pending.remove(first)
        ready, stage, j, kind, transfer = first
        deliver(kind, stage, j if kind in ("forward", "backward") else 0, ready, transfer)
