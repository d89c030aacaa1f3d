import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Link
from farpipe.engine.control.measured import (
    Passages,
    as_in_step,
    as_measured,
    deviations,
    fit_link,
    largest_change,
    replaced,
)
from two_sites import two_sites


def real_problem(latency_s=0.06, rate=50e6 / 8, times=(0.02, 0.02, 0.02), num_microbatches=12):
    """Four ranks at two sites, messages of 0.5 MB."""
    problem = two_sites(times, num_ranks=4, num_microbatches=num_microbatches)
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=rate)
    hops = tuple(
        hop
        and hop.model_copy(
            update={way: getattr(hop, way).model_copy(update={"bytes": 5e5}) for way in ("forward", "backward")}
        )
        for hop in problem.hops
    )
    return replaced(problem, links={"a>b": link, "b>a": link}, hops=hops)


BELIEVED = real_problem(latency_s=0.01, rate=200e6 / 8, times=(0.01, 0.01, 0.01))


def noisy(timeline, seed, outliers=0.05):
    """A Timeline as a real machine would show it: a little late, now and then very late."""
    random = np.random.default_rng(seed)
    actions, messages = timeline.actions.copy(), timeline.messages.copy()
    actions["end_s"] += random.exponential(1e-4, len(actions)) + 0.1 * (random.random(len(actions)) < outliers)
    messages["arrival_s"] += random.exponential(1e-4, len(messages)) + 0.2 * (random.random(len(messages)) < outliers)
    return type(timeline)("measured", timeline.num_ranks, timeline.links, actions, messages)


@pytest.mark.parametrize("method", ["1f1b", "eager", "zb-2p"])
def test_what_was_played_is_found_again(method):
    real = real_problem()
    window = [noisy(simulate(real, order(method, real)), seed) for seed in range(3)]
    found = as_measured(BELIEVED, window)
    for stage in found.stages:
        assert (stage.forward_s, stage.input_grad_s) == pytest.approx((0.02, 0.02), rel=0.03)
    for link in found.links.values():
        assert link.bandwidth_bytes_per_s == pytest.approx(50e6 / 8, rel=0.03)
        assert link.latency_s == pytest.approx(0.06, abs=0.002)


def test_the_prediction_with_what_was_found_is_what_was_measured():
    real = real_problem(times=(0.015, 0.03, 0.01))
    schedule = order("eager", real)
    found = as_measured(BELIEVED, [noisy(simulate(real, schedule), seed) for seed in range(3)])
    assert simulate(found, schedule).makespan_s == pytest.approx(simulate(real, schedule).makespan_s, rel=0.02)
    assert simulate(BELIEVED, schedule).makespan_s < 0.7 * simulate(real, schedule).makespan_s


def test_what_the_measurements_can_not_tell_stays():
    link = Link(latency_s=0.01, bandwidth_bytes_per_s=1e6)
    ready = np.arange(10) * 1.0
    alone = Passages(ready, ready + 0.1 + 0.03, np.full(10, 1e5), np.full(10, 1e-5))
    found = fit_link(link, [alone])
    assert found.bandwidth_bytes_per_s == 1e6, "messages of one size that never queue tell only the sum"
    assert found.latency_s == pytest.approx(0.03)
    seen = fit_link(link, [alone._replace(on_link_s=np.full(10, 0.05))])
    assert (seen.bandwidth_bytes_per_s, seen.latency_s) == pytest.approx((2e6, 0.08)), "but senders may have seen it"
    assert fit_link(link, []) == link
    assert as_measured(BELIEVED, []) == BELIEVED


def test_two_sizes_tell_latency_from_rate():
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e6)
    ready, size = np.arange(20) * 1.0, np.tile([1e4, 1e5], 10)
    found = fit_link(link, [Passages(ready, ready + 0.05 + size / 4e6, size, np.full(20, 1e-5))])
    assert (found.latency_s, found.bandwidth_bytes_per_s) == pytest.approx((0.05, 4e6), rel=0.02)


@example(latency_s=0.0, rate=4814198.0, seed=7)
@given(st.floats(0, 0.2), st.floats(1e5, 1e8), st.integers(0, 1000))
def test_arrivals_are_explained_whatever_the_link(latency_s, rate, seed):
    random = np.random.default_rng(seed)
    ready = np.cumsum(random.exponential(0.02, 30))
    size = random.choice([1e5, 5e5], 30)
    end = 0.0
    arrivals = []
    for moment, num_bytes in zip(ready, size, strict=True):
        end = max(moment, end) + num_bytes / rate
        arrivals.append(end + latency_s)
    step = Passages(ready, np.array(arrivals), size, np.full(30, 1e-6))
    found = fit_link(Link(latency_s=0.01, bandwidth_bytes_per_s=1e7), [step])
    end, errors = 0.0, []
    for moment, num_bytes, arrival in zip(ready, size, arrivals, strict=True):
        end = max(moment, end) + num_bytes / found.bandwidth_bytes_per_s
        errors.append(abs(end + found.latency_s - arrival))
    assert np.mean(errors) < 1e-3 + 0.01 * np.mean(arrivals - ready)


def test_durations_of_single_microbatches_keep_their_proportions():
    stages = tuple(
        s.model_copy(update={"forward_s": tuple(0.01 * (1 + j % 2) for j in range(12))}) for s in BELIEVED.stages
    )
    uneven = replaced(BELIEVED, stages=stages)
    slower = tuple(s.model_copy(update={"forward_s": tuple(3 * f for f in s.forward_s)}) for s in stages)
    real = replaced(uneven, stages=slower)
    found = as_measured(uneven, [simulate(real, order("1f1b", real))])
    assert found.stages[0].forward_s == pytest.approx(slower[0].forward_s)


def test_a_duration_that_was_believed_to_be_nothing_is_measured():
    free = tuple(stage.model_copy(update={"weight_grad_s": 0.0}) for stage in BELIEVED.stages)
    believed = replaced(BELIEVED, stages=free)
    found = as_measured(believed, [simulate(BELIEVED, order("zb-h1", BELIEVED))])
    assert found.stages[1].weight_grad_s == pytest.approx(0.01)


def test_the_largest_change_is_told():
    assert largest_change(BELIEVED, BELIEVED) == 0
    faster = replaced(BELIEVED, links=real_problem().links)
    assert largest_change(BELIEVED, faster) == pytest.approx((0.06 + 0.08) / 0.03 - 1)
    slower = real_problem(latency_s=0.01, rate=200e6 / 8, times=(0.01, 0.015, 0.01))
    assert largest_change(BELIEVED, slower) == pytest.approx(35 / 30 - 1)
    tiny = {name: Link(latency_s=0.0101, bandwidth_bytes_per_s=25e6) for name in BELIEVED.links}
    assert largest_change(BELIEVED, replaced(BELIEVED, links=tiny)) < 0.01


def test_a_step_tells_what_has_changed_since():
    far = real_problem(latency_s=0.06, rate=200e6 / 8, times=(0.01, 0.015, 0.01))
    schedule = order("eager", BELIEVED)
    assert np.abs(deviations(BELIEVED, simulate(BELIEVED, schedule))).max() == pytest.approx(0, abs=1e-9)
    seen = deviations(BELIEVED, noisy(simulate(far, schedule), seed=0))
    assert seen[:4] == pytest.approx([35 / 30 - 1] * 4, rel=0.1)
    assert seen[4:] == pytest.approx([0.05 / 0.03] * 2, rel=0.1), "the time of a message"
    back = deviations(far, simulate(BELIEVED, schedule))
    assert (back[:4] < 0).all()
    assert back[4:] == pytest.approx([-0.05 / 0.03] * 2, rel=0.1)
    assert largest_change(far, BELIEVED) == largest_change(BELIEVED, far)


def test_small_differences_tell_nothing_of_a_stage():
    """So stages that are alike stay so."""
    slightly = tuple(
        stage.model_copy(update={"forward_s": 0.01 + 1e-5 * number}) for number, stage in enumerate(BELIEVED.stages)
    )
    real = replaced(BELIEVED, stages=slightly)
    assert as_measured(BELIEVED, [simulate(real, order("1f1b", real))]).stages == BELIEVED.stages


@pytest.mark.parametrize("method", ["zb-h1", "1f1b"])
def test_a_step_can_be_played_again_in_another_order(method):
    """With its own durations; where it had B, I and W share them."""
    random = np.random.default_rng(0)
    times = {f: tuple(random.uniform(0.01, 0.02, 12)) for f in ("forward_s", "input_grad_s", "weight_grad_s")}
    times["weight_grad_s"] = times["input_grad_s"]
    real = replaced(BELIEVED, stages=tuple(stage.model_copy(update=times) for stage in BELIEVED.stages))
    sample = as_in_step(BELIEVED, simulate(real, order(method, real)))
    for figure, values in times.items():
        assert getattr(sample.stages[1], figure) == pytest.approx(values)
