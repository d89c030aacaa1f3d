"""A pipeline over light paths among background traffic: the frozen check, the plain twin, and what follows by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.errors import InfeasibleError, InputError, UsageError
from farpipe.optical import (
    PoissonTraffic,
    find_modulation,
    find_network,
    find_policy,
    k_shortest,
    load_paths,
    load_trace,
)
from farpipe.optical.coupled import PENDING, Coupled, Shared
from farpipe.optical.lit_problem import lit_problem
from farpipe.optical.network import build_network
from farpipe.optical.spectrum import Grid
from farpipe.optical.traffic import Traffic
from farpipe.optical.training import Demands, Training, TransferRule, pipeline_problem
from farpipe.schedule.library import order
from farpipe.simulate import simulate
from optical_data import BY_KM, LINKS, TRACE, needs_data
from optical_pipeline_twin import PlainCoupled, close

NODES = ("1", "4", "4", "10", "6", "14", "8", "12")


def training_of(name="gpipe", nodes=NODES, num_microbatches=16, num_bytes=512e6, forward=0.026, backward=0.052):
    count = len(nodes)
    problem = pipeline_problem(
        [forward * (1 + 0.0137 * s) for s in range(count)],
        [backward * (1 + 0.0071 * s) for s in range(count)],
        num_microbatches,
        nodes,
        num_bytes,
    )
    return Training(problem, order(name, problem), nodes)


@needs_data
@pytest.mark.parametrize(
    ("units", "seconds", "refused", "carried"), [(3, 221.439494, 37, 9576), (6, 341.944537, 696, 9561)]
)
def test_the_frozen_coupled_check(units, seconds, refused, carried):
    network = find_network(str(LINKS))
    shared = Shared(load_paths(BY_KM, network), Grid(100), traffic=load_trace(TRACE, network))
    training = training_of()
    coupled = Coupled(shared, training, TransferRule(), begin_s=300.0)
    steps = [coupled.step(Demands.same(training, units)) for _ in range(100)]
    coupled.wait_until(2000.0)
    assert coupled.now_s == 2000.0
    assert round(steps[-1].end_s - 300, 6) == seconds
    assert (sum(s.num_refused for s in steps), sum(s.num_sent for s in steps)) == (refused, 19_200)
    assert (coupled.background_path >= 0).sum() == carried
    assert PENDING not in coupled.background_path


def rows(edges):
    return [(f"edge {i}", {"a": a, "b": b, "km": km}) for i, (a, b, km) in enumerate(edges)]


RING = build_network(
    "ring", rows([("a", "b", 500), ("b", "c", 300), ("c", "d", 700), ("d", "a", 400), ("a", "c", 900)])
)


CHOICES = (
    {},
    {"earliest": True},
    {"spread": True},
    {"spread": True, "price_s": 0.001},
    {"spread": True, "patient": True},
    {"spread": True, "widen": True},
    {"spread": True, "patient": True, "widen": True},
    {"spread": True, "patient": True, "book": True},
    {"spread": True, "patient": True, "book": True, "widen": True, "move": True, "price_s": 0.001},
    {"spread": True, "move": True},
)


@st.composite
def settings_of_a_run(draw):
    nodes = tuple(draw(st.lists(st.sampled_from("abcd"), min_size=2, max_size=5)))
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    training = training_of(name, nodes, draw(st.integers(1, 5)), 1e9, forward=0.01, backward=0.02)
    choice = draw(st.sampled_from(CHOICES))
    rule = TransferRule(
        policy=find_policy(draw(st.sampled_from(["ksp-ff", "last-fit", "ff-ksp", "min-cuts", "cd"]))),
        unit_gbit=draw(st.sampled_from([75.0, 12.5])),
        max_blocks=draw(st.integers(1, 2)),
        setup_s=0.0 if choice.keys() & {"widen", "move"} else draw(st.sampled_from([0.0, 0.003])),
        one_at_a_time=draw(st.booleans()),
        **choice,
    )
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    want = random.integers(1, 7, training.num_messages)
    demands = Demands(want, random.integers(1, want + 1), random.integers(0, 2, training.num_messages))
    paths = k_shortest(RING, k=draw(st.integers(1, 3)), by=draw(st.sampled_from(["km", "hops"])))
    how = PoissonTraffic(draw(st.sampled_from([1.0, 8.0])), 0.2, 4, 12)
    traffic = how.draw(tuple(paths.of_pair), 300, int(random.integers(1 << 30)))
    grid = Grid(draw(st.sampled_from([14, 24, 70])))
    modulation = find_modulation(draw(st.sampled_from(["64qam", "deeprmsa"])))
    if modulation.name == "deeprmsa":  # 6 units of 75 Gbit/s do not fit 14 slots at 1 bit/s/Hz
        grid = Grid(70)
    shared = Shared(paths, grid, modulation, traffic, background_modulation=find_modulation("bpsk"))
    return shared, training, rule, demands


@settings(max_examples=60, deadline=None)
@given(settings_of_a_run())
def test_compiled_and_plain_simulator_agree_message_by_message(run):
    shared, training, rule, demands = run
    plain, compiled = PlainCoupled(shared, training, rule), Coupled(shared, training, rule)
    for _ in range(2):
        expected = plain.step(demands)
        step = compiled.step(demands)
        assert close(step.end_s, expected)
        for message in training.sent:
            assert close(step.out.arrival_s[message], plain.arrival[message])
            assert step.out.units[message] == plain.units[message]
            assert step.out.refused[message] == (message in plain.refused)
    offset = len(shared.paths.paths)  # the background's candidates come behind the training's
    came = {i: int(path) - offset * (path >= 0) for i, path in enumerate(compiled.background_path) if path != -2}
    assert came == plain.carried


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "eager"])
def test_a_step_is_what_the_simulator_says_of_its_light_paths(name):
    training = training_of(name)
    network = find_network("nsfnet")
    paths = k_shortest(network)
    traffic = PoissonTraffic(60.0, 0.2, 4, 20).draw(tuple(paths.of_pair), 4000, seed=1)
    shared = Shared(paths, Grid(80), traffic=traffic, background_modulation=find_modulation("bpsk"))
    step = Coupled(shared, training, TransferRule(), begin_s=1.0).step(Demands.same(training, 3, 1))
    problem = lit_problem(step)
    assert simulate(problem, training.schedule).makespan_s == pytest.approx(step.makespan_s, rel=1e-9)
    assert step.timeline().makespan_s == pytest.approx(step.makespan_s, rel=1e-9)


def alone(rule, wishes_of, nodes=("a", "b"), num_microbatches=1, slots=20, **options):
    """A step on the ring without any background."""
    training = training_of("gpipe", nodes, num_microbatches, 75e9 / 8 * 0.1, **options)  # 0.1 s on one unit
    coupled = Coupled(Shared(k_shortest(RING, k=2), Grid(slots, guard=0)), training, rule, num_logged=100)
    return coupled.step(wishes_of(training)), coupled


def test_set_up_time_is_paid_unless_one_asks_ahead():
    plain, _ = alone(TransferRule(), lambda t: Demands.same(t, 1))
    late, _ = alone(TransferRule(setup_s=0.01), lambda t: Demands.same(t, 1))
    ahead, _ = alone(TransferRule(setup_s=0.01, ahead=True), lambda t: Demands.same(t, 1))
    assert late.makespan_s == pytest.approx(plain.makespan_s + 0.02)
    assert ahead.makespan_s == pytest.approx(plain.makespan_s)
    assert ahead.held_slot_s == pytest.approx(plain.held_slot_s + 0.02)
    too_long, _ = alone(TransferRule(setup_s=0.1, ahead=True), lambda t: Demands.same(t, 1))
    forward, backward = 0.026, 0.052 * 1.0071  # only the time of the action that makes the message is hidden
    hidden = forward * 1.0 + backward
    assert too_long.makespan_s == pytest.approx(plain.makespan_s + 0.2 - hidden, abs=1e-6)


def test_asking_at_a_planned_time_hides_any_set_up():
    plain, _ = alone(TransferRule(), lambda t: Demands.same(t, 1))

    def planned(training):
        same = Demands.same(training, 1)
        return Demands(same.want, same.least, same.priority, np.maximum(0.0, plain.out.ready_s - 0.1))

    early, _ = alone(TransferRule(setup_s=0.1), planned)
    late, _ = alone(TransferRule(setup_s=0.1), lambda t: Demands.same(t, 1))
    assert plain.makespan_s < early.makespan_s < late.makespan_s - 0.1  # the first has no time to be hidden in


def test_a_kept_light_path_is_set_up_once():
    rule = TransferRule(setup_s=0.1, keep_s=10.0)
    step, coupled = alone(rule, lambda t: Demands.same(t, 1), num_microbatches=4)
    assert len(coupled.log) == 2  # one forward, one back
    each, _ = alone(TransferRule(setup_s=0.1), lambda t: Demands.same(t, 1), num_microbatches=4)
    assert (each.wait_s > 0.09).all()
    again = coupled.step(Demands.same(step.training, 1))
    assert (again.wait_s < 0.3).all()  # they queue, but none is set up
    assert len(coupled.log) == 2
    assert again.held_slot_s == pytest.approx(2 * again.makespan_s)  # one slot each way, all the time
    coupled.wait_until(coupled.now_s + 20)
    assert np.isfinite(coupled.log[:, 5]).all()


def test_a_kept_light_path_is_given_back_when_idle():
    rule = TransferRule(keep_s=0.001)
    _, coupled = alone(rule, lambda t: Demands.same(t, 6), num_microbatches=3)
    assert len(coupled.log) > 2


def test_one_light_path_at_a_time_makes_the_others_wait():
    free, _ = alone(TransferRule(), lambda t: Demands.same(t, 1), num_microbatches=4)
    one, _ = alone(TransferRule(one_at_a_time=True), lambda t: Demands.same(t, 1), num_microbatches=4)
    assert one.makespan_s > free.makespan_s
    assert one.num_refused == free.num_refused == 0


def test_blocks_side_by_side_add_up():
    # Two candidates of 4 slots each: 6 units fit only as 4 + 2.
    demands = lambda t: Demands.same(t, 6, 1)  # noqa: E731
    one, _ = alone(TransferRule(), demands, slots=4)
    two, _ = alone(TransferRule(max_blocks=2), demands, slots=4)
    assert list(one.out.units[one.training.sent]) == [4, 4]
    assert list(two.out.units[two.training.sent]) == [6, 6]
    assert two.makespan_s < one.makespan_s


def test_those_who_wait_are_served_by_priority():
    def demands(training):
        same = Demands.same(training, 4)
        priority = np.ones(training.num_messages, np.int64)
        priority[3] = 0  # the last forward first
        return Demands(same.want, same.least, priority)

    nodes = ("a", "b")
    step, _ = alone(TransferRule(), demands, nodes, 4, slots=4, forward=0.001)
    plain, _ = alone(TransferRule(), lambda t: Demands.same(t, 4), nodes, 4, slots=4, forward=0.001)
    assert step.out.grant_s[3] < plain.out.grant_s[3]
    assert step.out.grant_s[2] > plain.out.grant_s[2]


def test_more_than_there_is_is_refused_with_the_message():
    with pytest.raises(InfeasibleError, match="a message from a to b never finds 6 units of 75 Gbit/s in 4 slots"):
        alone(TransferRule(), lambda t: Demands.same(t, 6), slots=4)


def test_wrong_trainings_are_refused():
    training = training_of()
    with pytest.raises(InputError, match="there is no node '1'"):
        Coupled(Shared(k_shortest(RING), Grid()), training, TransferRule())
    with pytest.raises(InputError, match="expected one per rank, 8, found 2"):
        Training(training.problem, training.schedule, ("a", "b"))


@pytest.mark.parametrize(
    "options",
    [
        {"max_blocks": 5},
        {"patient": True},
        {"spread": True, "widen": True, "setup_s": 0.1},
        {"spread": True, "move": True, "keep_s": 0.1},
        {"spread": True, "book": True},
        {"unit_gbit": 0.0},
        {"setup_s": -1.0},
        {"keep_s": 1.0, "max_blocks": 2},
    ],
)
def test_senseless_rules_are_refused(options):
    with pytest.raises(UsageError):
        TransferRule(**options)


def test_the_earliest_block_weighs_width_against_length():
    # From a to c over d: 1100 km; straight: 900 km; over b: 800 km. By hops the straight path comes first.
    training = training_of("gpipe", ("a", "c"), 1, 75e9 / 8 * 0.1)
    paths = k_shortest(RING, k=3, by="hops")
    rules = [TransferRule(earliest=earliest) for earliest in (False, True)]
    plain, earliest = (
        Coupled(Shared(paths, Grid(20)), training, rule).step(Demands.same(training, 6, 1)) for rule in rules
    )
    assert earliest.out.arrival_s[0] == pytest.approx(plain.out.arrival_s[0] - 100 * 4.9e-6)
    assert paths.km[earliest.out.path[0]] == 800
    assert (earliest.out.units[earliest.training.sent] == 6).all()


def test_two_blocks_of_a_short_path_beat_one_of_a_long_one():
    # From a to c over b, 800 km, slots 5 to 8 of 12 are someone else's: 4 + 2 units there arrive before 6 straight.
    training = training_of("gpipe", ("a", "c"), 1, 75e9 / 8 * 0.02)
    paths, flat = k_shortest(RING, k=3), find_modulation("bpsk")
    times, pair = np.array([0.0, 0.1]), np.zeros(2, np.int32)
    taken = Traffic((("b", "c"),), times, pair, np.array([4.0, 3.0]) * 12.5, np.array([0.5, 9.0]))  # the first leaves
    arrivals = []
    for blocks in (1, 2):
        shared = Shared(paths, Grid(12), traffic=taken, background_modulation=flat)
        rule = TransferRule(earliest=True, max_blocks=blocks)
        step = Coupled(shared, training, rule, begin_s=1.0).step(Demands.same(training, 6, 1))
        arrivals.append(step.out.arrival_s[0] - step.out.ready_s[0])
        assert paths.km[step.out.path[0]] == (900 if blocks == 1 else 800)
        assert step.out.units[0] == 6
    assert arrivals[1] == pytest.approx(arrivals[0] - 100 * 4.9e-6)


def test_blocks_on_two_candidates_arrive_together():
    # From a to b: 4 units straight, 500 km, and 2 over c, 1200 km.
    near, far = 500 * 4.9e-6, 1200 * 4.9e-6
    step, coupled = alone(TransferRule(spread=True, max_blocks=2), lambda t: Demands.same(t, 6, 1), slots=4)
    assert step.out.units[0] == 6
    assert step.out.arrival_s[0] - step.out.ready_s[0] == pytest.approx((0.1 + 4 * near + 2 * far) / 6)
    ends = coupled.log[:2, 5] - step.out.ready_s[0]
    assert ends == pytest.approx([(0.1 + 4 * near + 2 * far) / 6 - delay for delay in (near, far)])
    dear = TransferRule(spread=True, max_blocks=2, price_s=0.1)  # two fibres for one
    step, _ = alone(dear, lambda t: Demands.same(t, 6, 1), slots=4)
    assert step.out.units[0] == 4


@pytest.mark.parametrize(
    ("rule", "units", "seconds"),
    [({}, 1, 0.1), ({"patient": True}, 4, 0.005 + 0.1 / 4), ({"widen": True}, 4, 0.005 + 0.095 / 4)],
)
def test_a_light_path_that_ends_is_waited_for_or_widens(rule, units, seconds):
    training = training_of("gpipe", ("a", "b"), 1, 75e9 / 8 * 0.1)
    begin_s, pair = 1.0, np.zeros(1, np.int32)  # 3 of 4 slots are taken until 5 ms after the message is ready
    taken = Traffic((("a", "b"),), np.zeros(1), pair, np.array([37.5]), np.array([begin_s + 0.026 + 0.005]))
    shared = Shared(
        k_shortest(RING, k=1), Grid(4, guard=0), traffic=taken, background_modulation=find_modulation("bpsk")
    )
    coupled = Coupled(shared, training, TransferRule(spread=True, **rule), begin_s=begin_s)
    step = coupled.step(Demands.same(training, 4, 1))
    assert step.out.units[0] == units
    assert step.out.arrival_s[0] - step.out.ready_s[0] == pytest.approx(seconds + 500 * 4.9e-6)
    assert not step.out.refused[0]


def booking(rule, taken, late):
    """A message of 0.1 units x s from a to b, where a request holds `taken` of 4 slots until 5 ms after it is ready,
    and another asks for `late` slots 2 ms after that, for 1 s."""
    training = training_of("gpipe", ("a", "b"), 1, 75e9 / 8 * 0.1)
    ready_s, slots = 1.026, np.array([taken, late]) * 12.5
    traffic = Traffic(
        (("a", "b"),), np.array([0.0, ready_s + 0.002]), np.zeros(2, np.int32), slots, np.array([ready_s + 0.005, 1.0])
    )
    shared = Shared(
        k_shortest(RING, k=1), Grid(4, guard=0), traffic=traffic, background_modulation=find_modulation("bpsk")
    )
    coupled = Coupled(shared, training, TransferRule(spread=True, **rule), begin_s=1.0)
    step = coupled.step(Demands.same(training, 4, 1))
    return step, [int(path) for path in coupled.background_path]


def test_what_is_booked_is_nobody_elses():
    step, background = booking({"patient": True}, taken=3.0, late=1.0)
    assert (step.out.units[0], background[1] >= 0) == (3, True)  # it waited, and somebody took the fourth slot
    step, background = booking({"patient": True, "book": True}, taken=3.0, late=1.0)
    assert (step.out.units[0], background[1]) == (4, -1)
    assert step.out.arrival_s[0] - step.out.ready_s[0] == pytest.approx(0.005 + 0.1 / 4 + 500 * 4.9e-6)
    assert step.held_slot_s == pytest.approx(0.005 + 0.1 + 0.1)  # a slot while it waits, 4 units, and the answer


def test_a_message_that_books_waits_but_is_not_refused():
    refused, _ = booking({"patient": True}, taken=4.0, late=1.0)
    booked, _ = booking({"patient": True, "book": True}, taken=4.0, late=1.0)
    assert (refused.refused_ratio, booked.refused_ratio) == (0.5, 0.0)  # one of two messages
    assert refused.waited_ratio == booked.waited_ratio == 0.5


def test_a_running_message_moves_where_the_rest_arrives_sooner():
    # 1 of 4 slots is free; 3 come free after 5 ms, but a block of 4 needs the one that is used, so that only moving
    # gets it in one block.
    rule = {"max_blocks": 1}
    plain, moved = (booking(rule | {"move": move}, taken=3.0, late=4.0)[0] for move in (False, True))
    assert (plain.out.units[0], moved.out.units[0]) == (1, 4)
    assert moved.out.arrival_s[0] - moved.out.ready_s[0] == pytest.approx(0.005 + 0.095 / 4 + 500 * 4.9e-6)


def test_the_background_may_have_candidates_of_its_own():
    training = training_of("gpipe", ("a", "c"), 2)
    traffic = PoissonTraffic(30.0, 0.2, 4, 12).draw((("b", "d"), ("a", "c")), 2000, 1)
    flat, few, many = find_modulation("bpsk"), k_shortest(RING, k=1), k_shortest(RING, k=3)
    refused = []
    for background in (few, many):
        shared = Shared(few, Grid(24), traffic=traffic, background_paths=background, background_modulation=flat)
        coupled = Coupled(shared, training, TransferRule())
        coupled.wait_until(50.0)
        refused.append((coupled.background_path == -1).sum())
    assert refused[1] < refused[0]
    with pytest.raises(InputError, match="background: there is no path from b to d"):
        Coupled(
            Shared(few, Grid(), traffic=traffic, background_paths=k_shortest(RING, [("a", "c")])),
            training,
            TransferRule(),
        )
