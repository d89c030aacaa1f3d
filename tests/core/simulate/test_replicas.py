from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings

from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import MESSAGE_KINDS
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer, stagger
from strategies import problems_with_schedules
from two_sites import two_sites


def play_replicas(problem, schedule, num_replicas):
    """The step time of `num_replicas` pipelines, event by event, each with ranks of its own.

    Where `num_staggered` is 1 each has a link of its own; the others are one link for all, on which first all replicas
    send their first message, then all their second, ..., in the order of the model. Collectives are done once for all.
    Everything happens as soon as it can: longest paths over edges (before, after), found by going round until nothing
    changes.
    """
    cost, edges = defaultdict(float), []
    for r in range(num_replicas):
        for row in schedule.ranks:
            edges += [((r, one), (r, other)) for one, other in pairwise(row)]
            for action in row:
                cost[r, action] = seconds_of(problem, action)
                edges += [((r, *need), (r, action)) for need in [needed(problem, action)] if need]
                edges += [((r, action), (r, *made(action), part)) for part in ("", "left") if action.kind != "W"]
    edges += list(on_links(problem, schedule, num_replicas, cost))
    end = dict.fromkeys([key for edge in edges for key in edge] + list(cost), 0.0)
    for key in end:
        end[key] = cost[key]
    for _ in range(len(end) + 1):
        late = [(after, end[before] + cost[after]) for before, after in edges if end[before] + cost[after] > end[after]]
        if not late:  # actions and collectives end a step, messages do not
            return max(seconds for key, seconds in end.items() if len(key) == 2 or key[0] == "all")
        for after, seconds in late:
            end[after] = max(end[after], seconds)
    raise AssertionError("they wait in a circle")


def seconds_of(problem, action):
    stage = problem.stages[action.stage]
    parts = {"F": [stage.forward_s], "I": [stage.input_grad_s], "W": [stage.weight_grad_s]}
    figures = parts.get(action.kind, parts["I"] + parts["W"])
    return sum(problem.row(figure)[action.microbatch] for figure in figures)


def made(action):
    return ("forward" if action.kind == "F" else "backward", action.stage, action.microbatch)


def needed(problem, action):
    """The message that an action waits for."""
    way, stage = ("forward", action.stage - 1) if action.kind == "F" else ("backward", action.stage + 1)
    there = action.kind != "W" and 0 <= stage < problem.num_stages
    return (way, stage, action.microbatch, "") if there else None


def on_links(problem, schedule, num_replicas, cost):
    """Edges of messages and collectives: (..., "left") is when one has left its link, (..., "") when it has arrived."""
    timeline, last_on, everyone = simulate(problem, schedule), {}, range(num_replicas)
    fields, last = timeline.messages.dtype.names, problem.num_microbatches
    messages = [dict(zip(fields, row, strict=True)) for row in timeline.messages.tolist()]
    for m in messages:
        m["kind"] = MESSAGE_KINDS[m["kind"]]
        place = {"reduce": 0, "exchange": 1}.get(m["kind"], 0)
        m["tie"] = m["kind"] != "gather", m["stage"], m["microbatch"] if m["microbatch"] >= 0 else last + place
    for m in sorted(messages, key=lambda m: (m["start_s"], m["ready_s"], m["tie"])):
        link = problem.links[timeline.links[m["link"]]] if m["link"] >= 0 else None
        for r in everyone if m["microbatch"] >= 0 else ("all",):
            left, there = ((r, m["kind"], m["stage"], m["microbatch"], part) for part in ("left", ""))
            cost[left], cost[there] = m["end_s"] - m["start_s"], link.latency_s if link else 0.0
            yield left, there
            lanes = {m["link"]} if link is None or link.num_staggered > 1 else {(m["link"], k) for k in everyone}
            for lane in lanes if r == "all" or len(lanes) == 1 else {(m["link"], r)}:
                if link is not None and lane in last_on:
                    yield last_on[lane], left
                last_on[lane] = left
            for action in (a for row in schedule.ranks for a in row if a.stage == m["stage"] and r == "all"):
                if m["kind"] == "gather" and action.kind == "F":
                    yield from ((there, (k, action)) for k in everyone)
                if m["kind"] in ("reduce", "exchange") and action.kind in "WB":
                    yield from (((k, action), left) for k in everyone)


@pytest.mark.slow
@given(problems_with_schedules(max_ranks=3, max_stages=4, max_microbatches=3, with_times=False))
@settings(max_examples=80, deadline=None)
def test_replicas_that_take_turns_never_take_longer_than_the_model_says(pair):
    problem, schedule = pair
    num_replicas = max((link.num_staggered for link in problem.links.values()), default=1)
    real_s = play_replicas(problem, schedule, num_replicas)
    said_s = simulate(problem, schedule).makespan_s
    assert real_s <= said_s + 1e-9
    if num_replicas == 1:
        assert real_s == pytest.approx(said_s)


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
@pytest.mark.parametrize("method", ["1f1b", "eager", "zb-h2", "gpipe"])
def test_where_all_messages_are_alike_the_model_is_exact(num_replicas, method):
    together = two_sites((2, 3, 1), (1, num_replicas), num_ranks=4, num_microbatches=6)
    problem = stagger(together, num_replicas)
    schedule = order(method, problem)
    said_s = simulate(problem, schedule).makespan_s
    assert said_s - 2.0 * (num_replicas - 1) <= play_replicas(problem, schedule, num_replicas) <= said_s


def test_a_stagger_saves_the_others_share_of_each_transfer_and_costs_it_once():
    """One microbatch, two replicas, 3 s a message: together 6 s each way; staggered 3 s each way and 3 s behind."""
    together = two_sites((1, 1, 0), (0, 6), num_ranks=2, num_microbatches=1)
    staggered = stagger(together, 2)
    both = [simulate(problem, order("1f1b", problem)) for problem in (together, staggered)]
    assert [timeline.makespan_s for timeline in both] == [4 + 2 * 6, 4 + 2 * 3 + 3]
    assert both[1].actions["start_s"].min() == 3
    assert (both[1].messages["end_s"] - both[1].messages["start_s"]).tolist() == [3, 3]
    assert lower_bound_s(staggered) == pytest.approx(both[1].makespan_s)


def test_unequal_messages_may_be_better_off_together():
    """A long message rarely, short ones often: each short one waits as long as a long one takes."""
    sizes = (20.0,) + (0.2,) * 15
    link = Link(latency_s=0, bandwidth_bytes_per_s=1)
    stages = tuple(Stage(rank=r, forward_s=1, input_grad_s=1, weight_grad_s=1) for r in range(2))
    hop = Hop(forward=Transfer(link="a>b", bytes=sizes), backward=Transfer(link="b>a", bytes=0.2))
    together = Problem(
        num_microbatches=16, ranks=(Rank(),) * 2, stages=stages, links={"a>b": link, "b>a": link}, hops=(hop,)
    )
    staggered = stagger(together, 2)
    assert staggered.traffic.stagger_s == 10
    assert step_s(together) < step_s(staggered)


def test_equal_messages_are_better_staggered():
    together = two_sites(delay=(1, 2), num_ranks=4, num_microbatches=6)
    assert step_s(stagger(together, 2)) < step_s(together)


def step_s(problem):
    return simulate(problem, order("1f1b", problem)).makespan_s


def test_links_with_collectives_take_turns_too_where_any_does():
    problem = two_sites(delay=(1, 2), num_ranks=2, num_microbatches=2)
    link = Link(latency_s=0, bandwidth_bytes_per_s=1)
    inside = Hop(forward=Transfer(link="a:0>a:1", bytes=4.0), backward=None)
    sync = (Sync(reduce=Transfer(link="a:0>a:1", bytes=1.0)), None)
    mixed = problem.model_copy(update={"links": problem.links | {"a:0>a:1": link}, "hops": (inside,), "sync": sync})
    staggered = stagger(mixed, 2)
    assert {name: link.num_staggered for name, link in staggered.links.items()} == {"a>b": 2, "b>a": 2, "a:0>a:1": 2}
    assert staggered.hops[0].forward.bytes == 4.0


def test_the_problem_survives_a_round_trip_and_says_who_takes_turns():
    problem = stagger(two_sites(delay=(1, 2), num_ranks=2, num_microbatches=2), 3)
    assert Problem.from_json(problem.to_json()) == problem
    assert "3 staggered replicas" in repr(problem)
