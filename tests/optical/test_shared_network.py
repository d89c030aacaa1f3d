"""A pipeline over light paths among background traffic: the frozen check, the plain twin, and what follows by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError, InputError, UsageError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.spec.cluster import SECONDS_PER_KM
from farpipe.optical import (
    PoissonTraffic,
    find_modulation,
    find_network,
    find_policy,
    k_shortest,
    load_paths,
    load_trace,
    pipeline_kernel,
)
from farpipe.optical.network import build_network
from farpipe.optical.shared_network import PENDING, NetworkPlayer, SharedNetwork
from farpipe.optical.spectrum import Grid
from farpipe.optical.traffic import Traffic
from farpipe.optical.transfers import Demands, LightTraining, TransferRule, lit_problem
from optical_data import BY_KM, LINKS, TRACE, pipeline_problem
from optical_pipeline_twin import PlainPlayer, close

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
    return LightTraining(problem, order(name, problem), nodes)


@pytest.mark.parametrize(
    ("units", "seconds", "refused", "carried"), [(3, 40.278631, 45, 1050), (6, 86.489653, 169, 1047)]
)
def test_the_frozen_coupled_check(units, seconds, refused, carried):
    network = find_network(str(LINKS))
    shared = SharedNetwork(load_paths(BY_KM, network), Grid(70), traffic=load_trace(TRACE, network))
    training = training_of()
    coupled = NetworkPlayer(shared, training, TransferRule(), begin_s=50.0)
    steps = [coupled.step(Demands.same(training, units)) for _ in range(15)]
    coupled.wait_until(200.0)
    assert coupled.now_s == 200.0
    assert round(steps[-1].end_s - 50, 6) == seconds
    assert (sum(s.num_refused for s in steps), sum(s.num_sent for s in steps)) == (refused, 2_880)
    assert (coupled.background_path >= 0).sum() == carried
    assert PENDING not in coupled.background_path


def rows(edges):
    return [(f"edge {i}", {"a": a, "b": b, "km": km}) for i, (a, b, km) in enumerate(edges)]


RING = build_network(
    "ring", rows([("a", "b", 500), ("b", "c", 300), ("c", "d", 700), ("d", "a", 400), ("a", "c", 900)])
)


CHOICES = ({}, {"earliest": True}, {"widen": True}, {"earliest": True, "widen": True})


@st.composite
def settings_of_a_run(draw):
    nodes = tuple(draw(st.lists(st.sampled_from("abcd"), min_size=2, max_size=5)))
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    training = training_of(name, nodes, draw(st.integers(1, 5)), 1e9, forward=0.01, backward=0.02)
    choice = draw(st.sampled_from(CHOICES))
    rule = TransferRule(
        policy=find_policy(draw(st.sampled_from(["ksp-ff", "last-fit", "ff-ksp", "min-cuts", "cd"]))),
        unit_gbit=draw(st.sampled_from([75.0, 12.5])),
        setup_s=draw(st.sampled_from([0.0, 0.003])),
        release_s=draw(st.sampled_from([0.0, 0.002])),
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
    shared = SharedNetwork(paths, grid, modulation, traffic, background_modulation=find_modulation("bpsk"))
    return shared, training, rule, demands


@settings(max_examples=60, deadline=None)
@given(settings_of_a_run())
def test_compiled_and_plain_simulator_agree_message_by_message(run):
    shared, training, rule, demands = run
    plain, compiled = PlainPlayer(shared, training, rule), NetworkPlayer(shared, training, rule)
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
    shared = SharedNetwork(paths, Grid(80), traffic=traffic, background_modulation=find_modulation("bpsk"))
    step = NetworkPlayer(shared, training, TransferRule(), begin_s=1.0).step(Demands.same(training, 3, 1))
    problem = lit_problem(step)
    assert simulate(problem, training.schedule).makespan_s == pytest.approx(step.makespan_s, rel=1e-9)
    assert step.timeline().makespan_s == pytest.approx(step.makespan_s, rel=1e-9)


def alone(rule, wishes_of, nodes=("a", "b"), num_microbatches=1, slots=20, **options):
    """A step on the ring without any background."""
    training = training_of("gpipe", nodes, num_microbatches, 75e9 / 8 * 0.1, **options)  # 0.1 s on one unit
    coupled = NetworkPlayer(SharedNetwork(k_shortest(RING, k=2), Grid(slots, guard=0)), training, rule, num_logged=100)
    return coupled.step(wishes_of(training)), coupled


def test_a_step_as_a_problem_has_links_with_the_fastest_rate_and_the_shortest_propagation():
    step, _ = alone(TransferRule(), lambda t: Demands.same(t, 2))
    links = lit_problem(step).links
    assert links.keys() == {"a>b", "b>a"}
    for link in links.values():
        assert link.latency_s == pytest.approx(RING.km["a", "b"] * SECONDS_PER_KM)
        assert link.bandwidth_bytes_per_s == pytest.approx(150e9 / 8)


def test_whole_seconds_do_not_have_the_kernel_compiled_anew():
    alone(TransferRule(setup_s=1.0, release_s=1.0, keep_s=1.0), lambda t: Demands.same(t, 1))
    known = len(pipeline_kernel.play.signatures)
    alone(TransferRule(unit_gbit=75, setup_s=1, release_s=0, retry_s=1, keep_s=2), lambda t: Demands.same(t, 1))
    assert len(pipeline_kernel.play.signatures) == known


def test_set_up_time_is_paid_unless_one_asks_ahead():
    plain, _ = alone(TransferRule(), lambda t: Demands.same(t, 1))
    late, _ = alone(TransferRule(setup_s=0.01), lambda t: Demands.same(t, 1))
    ahead, _ = alone(TransferRule(setup_s=0.01, ahead=True), lambda t: Demands.same(t, 1))
    assert late.makespan_s == pytest.approx(plain.makespan_s + 0.02)
    assert ahead.makespan_s == pytest.approx(plain.makespan_s)
    assert ahead.held_slot_s == pytest.approx(plain.held_slot_s + 0.02)
    released, _ = alone(TransferRule(release_s=0.01), lambda t: Demands.same(t, 1))
    assert released.makespan_s == plain.makespan_s
    assert released.held_slot_s == pytest.approx(plain.held_slot_s + 0.02)
    too_long, _ = alone(TransferRule(setup_s=0.1, ahead=True), lambda t: Demands.same(t, 1))
    forward, backward = 0.026, 0.052 * 1.0071  # only the time of the action that makes the message is hidden
    hidden = forward * 1.0 + backward
    assert too_long.makespan_s == pytest.approx(plain.makespan_s + 0.2 - hidden, abs=1e-6)


@pytest.mark.parametrize(("retry_s", "waits_s"), [(0.0, 0.005), (0.02, 0.02), (0.004, 0.008)])
def test_those_who_wait_try_again_at_releases_or_periodically(retry_s, waits_s):
    training = training_of("gpipe", ("a", "b"), 1, 75e9 / 8 * 0.1)
    pair = np.zeros(1, np.int32)  # all 4 slots are taken until 5 ms after the message is ready
    taken = Traffic((("a", "b"),), np.zeros(1), pair, np.array([50.0]), np.array([1.0 + 0.026 + 0.005]))
    shared = SharedNetwork(
        k_shortest(RING, k=1), Grid(4, guard=0), traffic=taken, background_modulation=find_modulation("bpsk")
    )
    step = NetworkPlayer(shared, training, TransferRule(retry_s=retry_s), begin_s=1.0).step(Demands.same(training, 4))
    assert step.wait_s == pytest.approx([waits_s, 0.0])
    with pytest.raises(InfeasibleError, match="never finds 5 units"):
        NetworkPlayer(shared, training, TransferRule(retry_s=retry_s)).step(Demands.same(training, 5))


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


def test_a_kept_light_path_is_replaced_by_a_wider_one():
    training = training_of("gpipe", ("a", "b"), 6, 75e9 / 8 * 0.1, forward=0.08)
    pair, ends_s = np.zeros(1, np.int32), 1.25  # 4 of 5 slots are taken until then
    taken = Traffic((("a", "b"),), np.zeros(1), pair, np.array([50.0]), np.array([ends_s]))
    shared = SharedNetwork(
        k_shortest(RING, k=1), Grid(5, guard=0), traffic=taken, background_modulation=find_modulation("bpsk")
    )
    rule = TransferRule(earliest=True, widen=True, keep_s=9.0, setup_s=0.01, release_s=0.02)
    coupled = NetworkPlayer(shared, training, rule, begin_s=1.0, num_logged=9)
    step = coupled.step(Demands.same(training, 4, 1))
    narrow, wide = (row for row in coupled.log if 0 <= row[0] < 6)
    assert (narrow[3], wide[3], wide[4]) == (1, 4, ends_s)
    assert list(step.out.units[:6]) == [1, 1, 1, 4, 4, 4]
    assert narrow[5] == pytest.approx(1.39 + 0.02)  # after a forward, the set-up and three messages
    assert step.out.end_s[:6] == pytest.approx([1.19, 1.29, 1.39, 1.415, 1.44, 1.505])


def test_a_kept_light_path_is_given_back_when_idle():
    rule = TransferRule(keep_s=0.001)
    _, coupled = alone(rule, lambda t: Demands.same(t, 6), num_microbatches=3)
    assert len(coupled.log) > 2


def test_one_light_path_at_a_time_makes_the_others_wait():
    free, _ = alone(TransferRule(), lambda t: Demands.same(t, 1), num_microbatches=4)
    one, _ = alone(TransferRule(one_at_a_time=True), lambda t: Demands.same(t, 1), num_microbatches=4)
    assert one.makespan_s > free.makespan_s
    assert one.num_refused == free.num_refused == 0


@pytest.mark.parametrize("rule", [{"one_at_a_time": True}, {"keep_s": 1.0}])
def test_nobody_overtakes_at_a_hop_of_one_light_path(rule):
    training = training_of("gpipe", ("a", "b"), 3, 75e9 / 8 * 0.1, forward=0.001)
    pair = np.zeros(1, np.int32)  # 3 of 4 slots are taken until 2 s: the first message does not fit, those behind would
    taken = Traffic((("a", "b"),), np.zeros(1), pair, np.array([37.5]), np.array([2.0]))
    shared = SharedNetwork(
        k_shortest(RING, k=1), Grid(4, guard=0), traffic=taken, background_modulation=find_modulation("bpsk")
    )
    want = np.ones(training.num_messages, np.int64)
    want[0] = 4
    step = NetworkPlayer(shared, training, TransferRule(**rule), begin_s=1.0).step(Demands(want, want, 0 * want))
    grants = step.out.grant_s[:3]
    assert grants[0] == 2.0
    assert (np.diff(grants) >= 0).all()
    assert list(step.out.refused[:3]) == [True, False, False]  # those behind wait without asking


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
        NetworkPlayer(SharedNetwork(k_shortest(RING), Grid()), training, TransferRule())
    with pytest.raises(InputError, match="expected one per rank, 8, found 2"):
        LightTraining(training.problem, training.schedule, ("a", "b"))


@pytest.mark.parametrize(
    "options",
    [
        {"release_s": -1.0},
        {"retry_s": -1.0},
        {"retry_s": 1e-15},
        {"unit_gbit": 0.0},
        {"setup_s": -1.0},
        {"keep_s": -1.0},
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
        NetworkPlayer(SharedNetwork(paths, Grid(20)), training, rule).step(Demands.same(training, 6, 1))
        for rule in rules
    )
    assert earliest.out.arrival_s[0] == pytest.approx(plain.out.arrival_s[0] - 100 * SECONDS_PER_KM)
    assert paths.km[earliest.out.path[0]] == 800
    assert (earliest.out.units[earliest.training.sent] == 6).all()


@pytest.mark.parametrize(
    ("rule", "units", "seconds"),
    [
        ({}, 1, 0.1),
        ({"widen": True}, 4, 0.005 + 0.095 / 4),
        ({"widen": True, "setup_s": 0.01}, 4, 0.01 + 0.005 + 0.095 / 4),  # 0.095 are left when it is set up
    ],
)
def test_a_light_path_that_ends_widens_a_message(rule, units, seconds):
    training = training_of("gpipe", ("a", "b"), 1, 75e9 / 8 * 0.1)
    begin_s, pair = 1.0, np.zeros(1, np.int32)  # 3 of 4 slots are taken until 5 ms after the message is ready
    taken = Traffic((("a", "b"),), np.zeros(1), pair, np.array([37.5]), np.array([begin_s + 0.026 + 0.005]))
    shared = SharedNetwork(
        k_shortest(RING, k=1), Grid(4, guard=0), traffic=taken, background_modulation=find_modulation("bpsk")
    )
    coupled = NetworkPlayer(shared, training, TransferRule(earliest=True, **rule), begin_s=begin_s)
    step = coupled.step(Demands.same(training, 4, 1))
    assert step.out.units[0] == units
    assert step.out.arrival_s[0] - step.out.ready_s[0] == pytest.approx(seconds + 500 * SECONDS_PER_KM)
    assert not step.out.refused[0]


def test_the_background_may_have_candidates_of_its_own():
    training = training_of("gpipe", ("a", "c"), 2)
    traffic = PoissonTraffic(30.0, 0.2, 4, 12).draw((("b", "d"), ("a", "c")), 2000, 1)
    flat, few, many = find_modulation("bpsk"), k_shortest(RING, k=1), k_shortest(RING, k=3)
    refused = []
    for background in (few, many):
        shared = SharedNetwork(few, Grid(24), traffic=traffic, background_paths=background, background_modulation=flat)
        coupled = NetworkPlayer(shared, training, TransferRule())
        coupled.wait_until(50.0)
        refused.append((coupled.background_path == -1).sum())
    assert refused[1] < refused[0]
    with pytest.raises(InputError, match="background: there is no path from b to d"):
        NetworkPlayer(
            SharedNetwork(few, Grid(), traffic=traffic, background_paths=k_shortest(RING, [("a", "c")])),
            training,
            TransferRule(),
        )
