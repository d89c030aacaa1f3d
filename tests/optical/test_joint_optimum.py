"""The joint optimum of order, spectrum and time: equal to trying everything, and never beaten by a policy."""

from itertools import combinations, permutations, product

import pytest

from benchmarks.optical.joint_optimum import RULE, TICK_S, TIMES, Case, Setting, Taken, program_of, solve, step_s
from benchmarks.optical.optical_training import pipeline_problem
from farpipe.core.schedule.library import order
from farpipe.optical import Grid, find_modulation, find_network, k_shortest
from farpipe.optical.demands import find_transfer_policy
from farpipe.optical.shared_network import SharedNetwork
from farpipe.optical.transfers import nominal_problem

FORWARD_S, BACKWARD_S, SLOT_S = 0.02, 0.03, 0.12
LATENCY_S = 200 * 4.9e-6
STANDING = 0.05


@pytest.fixture
def tiny(tmp_path):
    """Two stages, two microbatches, one fibre of 200 km with two slots, the lower one taken for 50 ms."""
    edges = tmp_path / "edges.csv"
    edges.write_text("a,b,km\nx,y,200\n")
    paths = k_shortest(find_network(str(edges), shared=True), k=1)
    problem = pipeline_problem([FORWARD_S] * 2, [BACKWARD_S] * 2, 2, ("x", "y"), SLOT_S * 75e9 / 8)
    stages = [stage.model_copy(update={"input_grad_s": BACKWARD_S, "weight_grad_s": 0.0}) for stage in problem.stages]
    problem = nominal_problem(problem.model_copy(update={"stages": tuple(stages)}), ("x", "y"), paths, 450.0)
    shared = SharedNetwork(paths, Grid(2, guard=0), find_modulation("64qam"))
    return Case(problem, ("x", "y"), shared, 0.0, (Taken(frozenset({0}), 0, 1, STANDING),))


def step_of(orders, lights, queue):
    """Makespan of one choice: orders of F and I of both ranks, slots of every message, and who goes first."""
    ends, sent = {}, {}
    while True:
        was = dict(ends), dict(sent)
        for rank, actions in enumerate(orders):
            now = 0.0
            for kind, j in actions:
                message = ("F", j) if (rank, kind) == (1, "F") else ("I", j) if (rank, kind) == (0, "I") else None
                if message:
                    slots = lights[message]
                    now = max(now, sent.get(message, 0.0) + SLOT_S / len(slots) + LATENCY_S)
                now = ends[rank, kind, j] = now + (FORWARD_S if kind == "F" else BACKWARD_S)
        for place, message in enumerate(queue):
            slots = lights[message]
            asked = max([STANDING if 0 in slots else 0.0] + [
                sent[other] + SLOT_S / len(lights[other]) + RULE.release_s
                for other in queue[:place]
                if slots & lights[other]
            ])  # fmt: skip
            sent[message] = max(asked + RULE.setup_s, ends["FI".index(message[0]), *message])
        if was == (ends, sent):
            return max(ends.values())
        if max(ends.values()) > 3:
            return float("inf")  # they wait for each other


def least_of_all():
    """Least makespan of every order, every block of every message, and every order in which they are served."""
    actions = [("F", 0), ("F", 1), ("I", 0), ("I", 1)]
    orders = [one for one in permutations(actions) if all(one.index(("F", j)) < one.index(("I", j)) for j in (0, 1))]
    messages, blocks = actions, [frozenset({0}), frozenset({1}), frozenset({0, 1})]
    first = [one for one in orders if one.index(("F", 0)) < one.index(("F", 1))]
    return min(
        step_of(both, dict(zip(messages, taken, strict=True)), queue)
        for both in product(first, orders)
        for taken in product(blocks, repeat=4)
        for queue in permutations(messages)
    )


@pytest.mark.slow
def test_a_tiny_step_is_equal_to_trying_everything(tiny):
    best = solve(program_of(tiny, 1.0), 30.0)
    assert best.makespan_s == pytest.approx(least_of_all(), abs=1e-9)
    assert best.bound_s == pytest.approx(best.makespan_s, abs=1e-9)


def blocks_of(case, best):
    """Fibres, slots and times of the light paths of an answer, and of those that stand there."""
    for message, (light, first) in best.lights.items():
        sent_s = best.sent_s[message]
        held = sent_s - case.rule.setup_s, sent_s + light.sent_s + case.rule.release_s
        yield case.fibres(light.path), (first, first + light.slots), held
    for one in case.taken:
        yield one.fibres, (one.first, one.first + one.slots), (0.0, one.until_s)


@pytest.mark.slow
def test_no_policy_is_below_the_bound_and_an_answer_overlaps_nothing():
    case = Setting("ab", 3, 2).case(1).still()
    assert len(case.taken) > 30
    best = solve(program_of(case, 2.0), 60.0)
    assert best.bound_s - 1e-9 <= best.makespan_s <= best.bound_s + 50 * TICK_S
    for name in ("1f1b", "zb-h1"):
        assert step_s(case, order(name, case.problem), find_transfer_policy("earliest", **TIMES)) >= best.bound_s
    for (fibres, slots, held), (others, their_slots, their_held) in combinations(blocks_of(case, best), 2):
        meet = slots[0] < their_slots[1] and their_slots[0] < slots[1]
        if fibres & others and meet:
            assert held[0] >= their_held[1] - 1e-9 or their_held[0] >= held[1] - 1e-9
