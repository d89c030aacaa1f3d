"""The search against brute force, and clusters with more sites than can be looked at."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farpipe import planning
from farpipe.core.schedule import peak_memory_bytes
from farpipe.core.schedule.bounds import lower_bound_s
from farpipe.core.schedule.library import order
from farpipe.core.spec import SiteLink, load_job, parse_job
from farpipe.core.step import problem as problem_module
from farpipe.planning.cost import JobCosts
from farpipe.planning.planner.candidates import MAX_PLANNED_SITES, decided
from farpipe.planning.planner.evaluate import Evaluated, evaluate, whole
from farpipe.planning.planner.lattice import Lattice
from farpipe.planning.planner.refinement import best_refined, refined
from farpipe.planning.planner.search import Search, search
from planning.planner.every_layout import candidates
from planning.planner.jobs import TRAINING, both_ways, device, job, planned, site

RECIPES = Path(__file__).parents[3] / "recipes"
MISS = 0.03
"""Gain that the guided search may miss on the clusters of this test; 0 was seen on most."""


@st.composite
def clusters(draw):
    """Up to three sites with up to 12 devices in all, unlike in speed, memory and links."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    names = "abc"[: len(sizes)]
    kinds = [("a100-80gb", 312e12, 80.0), ("h100-sxm", 989e12, 80.0), ("a100-40gb", 312e12, 2.5)]
    chosen = [draw(st.sampled_from(kinds)) for _ in names]
    sites = [
        site(n, size, device(k, memory, flops))
        for n, size, (k, flops, memory) in zip(names, sizes, chosen, strict=True)
    ]
    links = []
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            delay, rate = draw(st.sampled_from([0.001, 0.02])), draw(st.sampled_from([2.0, 100.0]))
            links += both_ways(one, other, latency_s=delay, gbit_per_s=rate)
    return job(sites, links, TRAINING.model_copy(update={"global_batch": 8, "microbatch_size": 1}), tensor=1)


@pytest.mark.slow
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(clusters())
def test_on_small_clusters_no_candidate_beats_the_answer(request):
    costs = JobCosts(request.model, request.training)
    every = [evaluate(request, candidate, costs) for candidate in candidates(request)]
    best_s = min(found.step_s for found in every if isinstance(found, Evaluated))
    evaluated = search(request, costs).evaluated
    assert evaluated[0].step_s <= best_s * (1 + 1e-9)
    guided = Search(request, costs, Lattice(request, costs))
    guided.run()
    assert best_s * (1 - 1e-9) <= guided.best_s <= best_s * (1 + MISS)


@pytest.mark.slow
def test_of_very_many_sites_the_largest_are_planned_and_that_is_said():
    number = 10_000
    sites = [site(f"s{index}", 4 if index % 1000 == 7 else 1) for index in range(number)]
    ring = [
        SiteLink(source=f"s{a}", target=f"s{b}", latency_s=0.01, bandwidth_bytes_per_s=1e9)
        for index in range(number)
        for a, b in ((index, (index + 1) % number), ((index + 1) % number, index))
    ]
    document = planned(job(sites, ring, tensor=1, data=1, num_microbatches=4, virtual=1))
    assert document.plan.placements[0].site.endswith("7")
    assert document.explanation.advice[0].startswith(
        f"Of 10,000 sites the {MAX_PLANNED_SITES} that compute most were looked at"
    )


def test_a_long_step_gets_a_plan_where_the_shorter_ones_order_is_out_of_memory():
    request = job([site("a", 2)], [], tensor=1, data=1, pipeline=2, virtual=1, num_microbatches=4)
    found = evaluate(request, candidates(request)[0], JobCosts(request.model, request.training), method="quick")
    assert isinstance(found, Evaluated)
    tight = found.problem.model_copy(update={"ranks": tuple(_just_for_1f1b(found.problem))})
    told = replace(found, problem=tight, schedule=order("gpipe", found.problem), extrapolated_s=1.0)
    assert whole(told).schedule.method in ("1f1b", "zb-1p")
    assert whole(told).extrapolated_s is None


def test_a_long_step_is_told_by_shorter_ones_alone(monkeypatch):
    many = TRAINING.model_copy(update={"global_batch": 1 << 16})
    request = job([site("a", 8)], training=many, tensor=1, data=1, pipeline=8, virtual=1)
    costs, longest, of_parts = JobCosts(request.model, request.training), 0, problem_module.traffic

    def traffic(links, hops, collectives, ranks, num_microbatches):
        nonlocal longest
        longest = max(longest, num_microbatches)
        return of_parts(links, hops, collectives, ranks, num_microbatches)

    monkeypatch.setattr(problem_module, "traffic", traffic)
    found = evaluate(request, candidates(request)[0], costs, method="quick")
    assert found.extrapolated_s is not None
    assert evaluate(request, candidates(request)[0], costs, 2 * found.step_s, "quick").step_s == found.step_s
    assert longest < 1000 < found.problem.num_microbatches


def test_a_bound_rules_out_a_long_step_and_that_is_no_rejection():
    many = TRAINING.model_copy(update={"global_batch": 1 << 12})
    request = job([site("a", 8)], training=many, tensor=1, data=1, pipeline=8, virtual=1)
    costs = JobCosts(request.model, request.training)
    found = evaluate(request, candidates(request)[0], costs, method="quick")
    assert found.extrapolated_s is not None
    least_s = lower_bound_s(found.problem) + found.overhead_s
    assert evaluate(request, candidates(request)[0], costs, least_s / 1.01, "quick") is None
    assert evaluate(request, candidates(request)[0], costs, least_s * 1.001, "quick").step_s == found.step_s


def _just_for_1f1b(problem):
    peaks = peak_memory_bytes(problem, order("1f1b", problem))
    return [rank.model_copy(update={"memory_bytes": peak}) for rank, peak in zip(problem.ranks, peaks, strict=True)]


def test_a_link_in_one_direction_joins_nothing():
    one_way = both_ways("a", "b")[:1]
    document = planned(job([site("a"), site("b")], one_way, tensor=1, data=1, virtual=1))
    assert document.plan.where in ("a", "b")
    assert any("a, b have no link both ways" in line for line in document.explanation.advice)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(clusters(), st.integers(1, 20))
def test_the_best_points_of_the_lattice_are_those_of_all_its_points(request, most):
    lattice = Lattice(request, JobCosts(request.model, request.training))
    every = {of[0].site_set: of for of in lattice.estimates(lattice.whole, 10_000, math.inf)}
    for of_set in lattice.estimates(lattice.whole, most, math.inf):
        assert of_set == every[of_set[0].site_set][:most]
    shared = [of_set[0].step_s for of_set in lattice.estimates(lattice.whole, 1, 1.1, shared=True)]
    best_s = min((of_set[0].step_s for of_set in every.values()), default=math.inf)
    assert min(shared, default=math.inf) == pytest.approx(best_s, rel=1e-12)


def test_estimates_of_four_stages_and_of_eight_in_a_v_are_what_they_were():
    """Frozen: the second has the constant share of a stage that a V idles for each rank but one."""
    request = decided(job([site("a")], [], pipeline=4, virtual=2, num_microbatches=16))
    lattice = Lattice(request, JobCosts(request.model, request.training))
    found = {one.in_v: one.step_s for one in lattice.estimates(lattice.whole, 9, math.inf)[0]}
    assert found == pytest.approx({False: 0.162723, True: 0.164862}, rel=1e-4)


def test_estimates_of_a_use_of_which_nothing_worked_at_first_are_corrected_by_the_first_that_does():
    request = decided(job([site("a")], []))
    costs = JobCosts(request.model, request.training)
    guided, tried = Search(request, costs, Lattice(request, costs)), []

    def worked(candidate, limit_s):
        """Every step takes 0.6 of its estimate of 1.0."""
        tried.append(candidate)
        guided.best_s = 0.6
        return SimpleNamespace(step_s=0.6)

    guided._try = worked
    first, second = guided.lattice.estimates(guided.lattice.whole, 2)[0]
    guided._near([first._replace(step_s=1.0), second._replace(step_s=1.05)])
    assert len(tried) == 2


def test_estimates_are_corrected_by_the_one_that_erred_least_so_far():
    request = decided(job([site("a")], []))
    costs = JobCosts(request.model, request.training)
    guided, tried = Search(request, costs, Lattice(request, costs)), []
    steps = {1.0: 1.3, 1.05: 1.1, 1.15: 1.0, 1.4: 1.0}
    found = guided.lattice.estimates(guided.lattice.whole, 4)[0]
    promises = [one._replace(step_s=seconds, in_v=False) for seconds, one in zip(steps, found, strict=True)]
    step_of = {id(promise.layout): steps[promise.step_s] for promise in promises}

    def worked(candidate, limit_s):
        tried.append(step_of[id(candidate.layout)])
        guided.best_s = min(guided.best_s, tried[-1])
        return SimpleNamespace(step_s=tried[-1])

    guided._try = worked
    guided._near(promises)
    assert tried == [1.3, 1.1, 1.0], "by the first alone the third would be thought 36 % behind"


def test_the_next_best_is_taken_where_its_order_comes_out_faster():
    request = decided(load_job(RECIPES / "three_sites_asymmetric.toml"))
    costs = JobCosts(request.model, request.training)
    found = search(request, costs).evaluated
    each = sorted(((refined(request, one, costs)[1].step_s, one) for one in found[:2]), key=lambda pair: -pair[0])
    _, best = best_refined(request, [one for _, one in each], costs)
    each = [step_s for step_s, _ in each]
    assert best.step_s == min(each) < each[0]


@pytest.mark.slow
def test_a_shorter_pipeline_is_found_although_the_first_estimates_err_more():
    """The exhaustive search needs minutes for it: 35.31 s, where the first point that was tried takes 40.14 s."""
    sites = "".join(f'[[cluster.sites]]\nname = "s{n}"\ndevice = "h100"\nnum_devices = 1024\n' for n in range(3))
    links = "".join(
        f'[[cluster.links]]\nbetween = ["s{a}", "s{b}"]\nlatency = "{20 + 2 * (a + b)} ms"\nbandwidth = "400 Gbit/s"\n'
        for b in range(3)
        for a in range(b)
    )
    head = '[model]\npreset = "llama-3-405b"\n[training]\nsequence_length = 8192\nglobal_batch = 2048\n'
    plan = planning.plan(parse_job(head + sites + links))
    assert plan.prediction.step_s < 35.4
    assert plan.layout.pipeline < 48, "that of the first point"
