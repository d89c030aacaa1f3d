"""Plans where steps differ: lost packets and jitter."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe import planning
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Problem, Rank, Transfer, retimed
from farpipe.core.step import Link as StepLink
from farpipe.core.step import Stage as StepStage
from farpipe.planning import refine
from farpipe.planning.cost import JobCosts
from farpipe.planning.cost.lossy_links import lateness_s, lossy_link
from farpipe.planning.planner.orders import try_orders
from farpipe.planning.planner.search import BEST_ONLY, search
from farpipe.planning.planner.step_samples import SEED, StepSamples, spread_of
from planning.planner.jobs import TRAINING, both_ways, job, site

FAR = {"latency_s": 0.020, "gbit_per_s": 1.0}
ACROSS = {"sites": ("a", "b"), "pipeline": 4, "data": 1, "tensor": 1, "virtual": 1}


def two_sites(loss=0.0, jitter_s=0.0, schedule=None, **pins):
    """A job over two sites with lossy links between them."""
    links = [link.model_copy(update={"loss": loss, "jitter_s": jitter_s}) for link in both_ways("a", "b", **FAR)]
    return job([site("a", 2), site("b", 2)], links, schedule=schedule, **(pins or ACROSS))


def test_a_long_step_of_staggered_replicas_over_such_links_is_extrapolated():
    links = [link.model_copy(update={"jitter_s": 1e-4}) for link in both_ways("a", "b", 0.002, 5.0)]
    training = TRAINING.model_copy(update={"global_batch": 2048, "microbatch_size": 1})
    asked = job([site("a", 4), site("b", 4)], links, training, **ACROSS | {"data": 2})
    best = search(asked, JobCosts(asked.model, training), BEST_ONLY).best
    assert best.extrapolated_s is not None
    assert any(link.num_staggered == 2 for link in best.problem.links.values())


def small_problem(num_microbatches=1, num_bytes=500_000.0):
    """Two ranks, one at each site, over links as those of `two_sites`."""
    link = StepLink(latency_s=0.020, bandwidth_bytes_per_s=125e6)
    hop = Hop(**{way: Transfer(link=n, bytes=num_bytes) for way, n in (("forward", "a>b"), ("backward", "b>a"))})
    stages = tuple(StepStage(rank=rank, forward_s=0.02, input_grad_s=0.02, weight_grad_s=0.02) for rank in (0, 1))
    links = {"a>b": link, "b>a": link}
    return Problem(num_microbatches=num_microbatches, ranks=(Rank(),) * 2, stages=stages, links=links, hops=(hop,))


@pytest.fixture(scope="module")
def plain():
    return planning.plan(two_sites())


@pytest.fixture(scope="module")
def lossy():
    return planning.plan(two_sites(loss=0.01))


def test_without_loss_and_jitter_nothing_is_new(plain):
    assert plain.prediction.spread is None
    assert spread_of(plain, plain.schedule) is None
    data = json.loads(plain.to_json())
    assert "spread" not in data["prediction"]
    assert plain.prediction.step_s == plain.prediction.makespan_s + plain.prediction.overhead_s


def test_plans_over_samples_are_the_same_every_time(lossy):
    assert planning.plan(two_sites(loss=0.01)).to_json() == lossy.to_json()
    assert type(lossy).from_json(lossy.to_json()) == lossy


def test_loss_makes_the_predicted_step_longer_and_1f1b_most(plain, lossy):
    alike, lost = (planning.plan(two_sites(loss=loss, schedule="1f1b")).prediction for loss in (0.0, 0.01))
    assert lost.step_s == lost.spread.mean_s > alike.step_s
    longer, longer_1f1b = lossy.prediction.step_s / plain.prediction.step_s, lost.step_s / alike.step_s
    assert 1 <= longer < longer_1f1b


def test_the_chosen_order_has_the_least_mean_of_all_named_ones(lossy):
    samples, overhead_s = StepSamples(lossy.job, lossy.problem), lossy.prediction.overhead_s
    chosen_s = samples.spread(lossy.schedule, overhead_s).mean_s
    assert chosen_s == lossy.prediction.spread.mean_s
    others = [o for o in try_orders(lossy.problem) if o.schedule is not None]
    assert len(others) > 3
    for other in others:
        assert chosen_s <= samples.spread(other.schedule, overhead_s).mean_s * (1 + 1e-9)


def test_a_search_takes_no_order_that_is_worse_over_the_samples(lossy):
    found, _ = refine(lossy, 0.5)
    assert found.prediction.spread.mean_s <= lossy.prediction.spread.mean_s


@settings(deadline=None, max_examples=25)
@given(st.floats(0, 0.1), st.floats(0, 0.02), st.integers(1, 6))
def test_nine_of_ten_are_at_least_half(loss, jitter_s, num_microbatches):
    asked = two_sites(loss, jitter_s)
    problem = small_problem(num_microbatches)
    samples = StepSamples(asked, problem, num_samples=20)
    schedule = order("1f1b", problem)
    spread = samples.spread(schedule, 0.5)
    assert 0.5 < spread.p50_s <= spread.p90_s
    assert spread == StepSamples(asked, problem, num_samples=20).spread(schedule, 0.5)
    assert samples.makespans_s(schedule).min() >= simulate(problem, schedule).makespan_s * (1 - 1e-9)


def test_samples_of_a_lossy_link_are_steps_whose_messages_are_late():
    """The plain twin again: every message of a sample with its own time."""
    asked, problem = two_sites(loss=0.005), small_problem(4)
    samples, schedule = StepSamples(asked, problem, num_samples=5), order("1f1b", problem)
    gap_s = simulate(problem, schedule).makespan_s / 4
    messages = problem.traffic.messages
    late_s = {
        at: lateness_s(lossy_link(asked.cluster, asked.cluster.links[at[0]]), 500_000, gap_s, (5, 4), seed)
        for at, seed in (((0, 0), SEED + 1), ((1, 1), SEED + 4))
    }
    found = samples.makespans_s(schedule)
    for sample in range(5):
        there_s = messages.arrives_after_s.copy()
        for at, late in late_s.items():
            there_s[at] += late[sample]
        twin = retimed(problem, messages.occupies_s, there_s)
        assert found[sample] == pytest.approx(simulate(twin, schedule).makespan_s, rel=1e-12)
    assert len(set(found)) > 1


def test_one_microbatch_takes_the_sum_of_its_way_in_the_mean():
    """One message there and one back: the closed form for one link."""
    asked, problem = two_sites(loss=0.002), small_problem(1)
    samples, schedule = StepSamples(asked, problem, num_samples=4000), order("1f1b", problem)
    alike_s = simulate(problem, schedule).makespan_s
    link = lossy_link(asked.cluster, asked.cluster.links[0])
    late_s = lateness_s(link, 500_000, math.inf, (4000, 1), seed=99)
    on_time = (1 - 0.002) ** (2 * link.packets_of(500_000))
    makespans_s = samples.makespans_s(schedule)
    assert makespans_s.mean() == pytest.approx(alike_s + 2 * late_s.mean(), abs=0.004)
    assert (makespans_s < alike_s + 1e-9).mean() == pytest.approx(on_time, abs=0.03)


def test_more_loss_never_makes_the_mean_step_shorter():
    problem = small_problem(8)
    schedule = order("1f1b", problem)
    means = [StepSamples(two_sites(loss), problem).makespans_s(schedule).mean() for loss in (0.0001, 0.001, 0.01, 0.1)]
    assert all(one < other for one, other in pairwise(means))


def test_replicas_at_both_sites_count_losses_in_their_sums():
    pins = {"sites": ("a", "b"), "pipeline": 2, "data": 2, "tensor": 1, "virtual": 1, "replicas": "across"}
    alike, lost = (planning.plan(two_sites(loss, **pins)) for loss in (0.0, 0.01))
    assert lost.layout.replica_sites
    assert lost.prediction.step_s > alike.prediction.step_s
    assert lost.prediction.spread.p90_s > lost.prediction.spread.p50_s


def test_the_mean_lateness_is_in_the_problem_of_a_plan(lossy):
    forward = lossy.problem.hops[1].forward
    link = lossy.problem.links[forward.link]
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (0.020, 125e6), "what a run paces and emulates by"
    assert forward.arrives_after_s > link.latency_s + forward.bytes / link.bandwidth_bytes_per_s
    assert lossy.problem.hops[0].forward.arrives_after_s is None


def test_a_named_schedule_is_kept():
    plan = planning.plan(two_sites(loss=0.01, schedule="1f1b"))
    assert plan.schedule.method == "1f1b"
    assert plan.prediction.spread is not None
