"""Documents on groups of devices of several context degrees: sound, never slower, and only where degrees are free."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.spec import Cluster, Job, Model, Pins, SiteLink, Training, preset_site
from farpipe.planning.planner.batches import plan_batch
from farpipe.planning.workload import BatchOptions, chunk_costs, plan_sequences
from farpipe.planning.workload.batch_plan import exchange_s
from farpipe.planning.workload.checkpointing import unrecomputed_tokens
from farpipe.planning.workload.device_groups import Devices, DocumentTimes, assignments, document_times, fewest
from sound_chunks import check_chunks

MODEL = Model(num_layers=8, hidden=4096, num_heads=32, ffn_hidden=11008, vocab_size=32000)
SKEWED = [60_000, 24_000, 9_000, 8_000, *[4_000] * 4, *range(500, 2_500, 50)]
PLAIN = BatchOptions(dynamic_context=False)


def job(devices=8, num_sites=1, model=MODEL, **pins):
    links = tuple(SiteLink(source=a, target=b, latency_s=0.001, bandwidth_bytes_per_s=1e11) for a, b in ("ab", "ba"))
    return Job(
        model=model,
        training=Training(sequence_length=65536, global_batch=64),
        cluster=Cluster(
            sites=tuple(preset_site(name, "a100-80gb", devices) for name in "ab"[:num_sites]),
            links=links if num_sites > 1 else (),
        ),
        layout=Pins(**pins),
    )


@settings(deadline=None)  # the first one loads a kernel
@given(
    st.lists(st.floats(0.1, 100.0), min_size=1, max_size=40),
    st.floats(0.1, 50.0),
    st.sampled_from([([1, 2, 4, 8], 8, 1), ([1, 2, 3, 4, 5, 8], 8, 1), ([1, 3, 6], 12, 2), ([1, 2, 5, 6], 12, 2)]),
    st.sampled_from([0.0, 3.0]),
)
def test_groups_hold_every_document_once_and_end_when_they_are_played(work_s, most_s, devices, fixed_s):
    degrees, num_devices, num_sites = devices
    seconds = np.array([[each * (1 / degree + 0.05 * (degree > 1)) for each in work_s] for degree in degrees])
    least = fewest(seconds, np.array(degrees)[:, None], most_s)
    shares = np.array([[min(1.0, each / (40.0 * degree)) for each in work_s] for degree in degrees])
    times = DocumentTimes(seconds + fixed_s * shares, shares, np.full(len(degrees), fixed_s))
    on = Devices(times, degrees, num_devices, num_sites)
    ends_s, (makespan_s, groups) = on.placed(least)[0], on.grouped(least)
    assert makespan_s == ends_s.max()
    assert sorted(index for group in groups for index in group.documents) == list(range(len(work_s)))
    assert [group.degree for group in groups] == sorted((group.degree for group in groups), reverse=True)
    free_s = [0.0] * num_devices
    for first, degree, documents in groups:
        each_site = num_devices // num_sites
        assert first % each_site % degree == 0
        assert first // each_site == (first + degree - 1) // each_site, "a group spans sites"
        for index in documents:
            mine = seconds[:, index]
            expected = next((d for d, each in zip(degrees, mine, strict=True) if each <= most_s), None)
            assert degree == (expected or degrees[int(mine.argmin())])
        number = degrees.index(degree)
        num_chunks = np.ceil(shares[number, documents].sum() - 1e-9)
        end_s = max(free_s[first : first + degree]) + seconds[number, documents].sum() + fixed_s * num_chunks
        free_s[first : first + degree] = [end_s] * degree
    assert ends_s == pytest.approx(np.array(free_s))


def test_a_document_goes_where_its_chunk_is_not_full_yet():
    shares, seconds = np.array([[0.6, 0.8, 0.3]]), np.array([[7.0, 6.5, 3.0]])
    times = DocumentTimes(seconds + 2 * shares, shares, np.array([2.0]))
    free_s, first = Devices(times, [1], 2).placed(np.zeros(3, np.int64))
    assert first[2] == first[0]  # 7 + 3 in one chunk, where 6.5 + 3 with a second chunk would end later
    assert sorted(free_s) == pytest.approx([8.5, 12.0])
    by_token = Devices(DocumentTimes.by_token(times.seconds), [1], 2).placed(np.zeros(3, np.int64))[1]
    assert by_token[2] == by_token[1]


@pytest.mark.slow
def test_moving_documents_comes_near_the_best_of_all_choices_where_no_limit_of_time_does():
    degrees, devices, random = [1, 2, 3], np.array([[1], [2], [3]]), np.random.default_rng(1)
    searched, limited = [], []
    for _ in range(6):
        alone_s, of_degrees = random.uniform(1, 20, 7), random.uniform(0.5, 1.3, (2, 7))
        seconds = alone_s / devices * np.vstack([np.full(7, 1.2), of_degrees])

        times = DocumentTimes.by_token(seconds)
        on = Devices(times, degrees, 5)

        def makespan_s(chosen, on=on):
            return on.grouped(np.array(chosen))[0]

        least_s = min(map(makespan_s, product(range(3), repeat=7)))
        limits = [fewest(seconds, costs, most_s) for costs in (devices, devices * seconds) for most_s in seconds.flat]
        limited.append(min(map(makespan_s, limits)) / least_s)
        unmoved_s, _ = assignments(times, degrees, 5, passes=0)[0]
        assert unmoved_s in map(makespan_s, limits[: seconds.size])  # those of the fewest devices
        step_s, groups = min(assignments(times, degrees, 5), key=lambda one: one[0])
        chosen = {index: degrees.index(group.degree) for group in groups for index in group.documents}
        assert step_s == makespan_s([chosen[index] for index in range(7)])
        searched.append(step_s / least_s)
    assert np.mean(searched) < 1.03
    assert np.mean(limited) > 1.06


@pytest.mark.slow
@pytest.mark.parametrize("num_sites", [1, 2])
def test_a_plan_in_groups_is_sound_and_faster_than_any_of_one_degree(num_sites):
    sizes, free = SKEWED * 3 * num_sites, job(num_sites=num_sites)
    plan, plain = plan_batch(free, sizes), plan_batch(free, sizes, PLAIN)
    assert plan.kind.endswith("groups of devices")
    assert plan.step_s < plain.step_s
    assert "groups of 1, " in plan.degrees
    assert "on few devices" in plan.why
    check_chunks([chunk for each in plan.replicas for chunk in each.chunks], sizes)
    free_s, ends_s = [0.0] * 8 * num_sites, []
    order = sorted(range(len(plan.places)), key=lambda i: (-plan.places[i].degree, plan.places[i].first_device))
    for index in order:
        place, each = plan.places[index], plan.replicas[index]
        (first, begin_s, costs, _), degree = place, place.degree
        assert first // 8 == (first + degree - 1) // 8, "a group spans sites"
        assert begin_s == pytest.approx(max(free_s[first : first + degree]))
        spent_s = work_s(each)
        assert sum(one.makespan_s for one in each.pipelines) - exchange_s(plan.layout) <= spent_s * (1 + 1e-9)
        free_s[first : first + degree] = [begin_s + spent_s] * degree
        ends_s.append(begin_s + each.step_s)
        assert each.peak_memory_bytes[0] <= costs.base.ranks[0].memory_bytes
    assert plan.step_s == pytest.approx(max(ends_s))
    groups = plan.to_data()["groups"]
    assert [group["context"] for group in groups] == [one.context for one in plan.costs]
    assert plan.contexts == {degree: sum(g["context"] == degree for g in groups) for degree in plan.contexts}


def work_s(plan):
    stages = [one.problem.stages[0] for one in plan.pipelines]
    return sum(sum(map(sum, (one.forward_s, one.input_grad_s, one.weight_grad_s))) for one in stages)


@pytest.mark.parametrize("pins", [{"context": 2}, {"data": 2}, {"pipeline": 4}])
def test_pinned_degrees_have_no_groups(pins):
    assert not plan_batch(job(**pins), SKEWED).places


@pytest.mark.slow
def test_devices_per_stage_and_other_packings_have_no_groups():
    assert not plan_batch(job(), SKEWED, None, 2).places
    for options in (BatchOptions(rule="literal"), BatchOptions(equal="tokens"), BatchOptions(num_slices=4)):
        assert not plan_batch(job(), SKEWED, options).places


def test_documents_of_one_chunk_take_what_the_estimate_says():
    costs = chunk_costs(job(pipeline=1, data=4), 65536, 2)
    for length in (500, 8_000, 60_000):
        alone = plan_sequences(costs, [length], BatchOptions(num_slices=1))
        fixed_s = costs.stages[0].laws.total.fixed_s * (1 - min(1, length / unrecomputed_tokens(costs)))
        assert document_times([costs], np.array([length])).seconds[0, 0] == pytest.approx(
            work_s(alone) - fixed_s, rel=0.01
        )


def test_what_does_not_fit_takes_for_ever():
    costs = chunk_costs(job(pipeline=1, data=8), 65536)
    assert math.isinf(document_times([costs], np.array([10_000_000])).seconds[0, 0])


def test_nothing_is_recomputed_up_to_the_limit_of_tokens():
    costs = chunk_costs(job(pipeline=1, data=8), 65536)
    limit = unrecomputed_tokens(costs)
    for length, again in ((limit, False), (limit + 10, True)):
        plan = plan_sequences(costs, [length], BatchOptions(num_slices=1))
        assert bool(plan.pipelines[0].recomputed.any()) == again


def test_chunks_of_short_documents_are_as_few_as_fit_and_of_about_equal_tokens():
    costs = chunk_costs(job(pipeline=1, data=8), 65536)
    limit = unrecomputed_tokens(costs)
    plan = plan_sequences(costs, [limit // 20] * 24, BatchOptions(num_slices=1))
    assert plan.batch.load.tokens.tolist() == [limit // 20 * 12] * 2
    plan = plan_sequences(costs, [limit // 20 + 1] * 39, BatchOptions(num_slices=1))  # 19 and 19 would leave one alone
    assert plan.batch.load.tokens.tolist() == [(limit // 20 + 1) * 13] * 3


@pytest.mark.slow
def test_devices_with_most_heads_set_the_pace_of_attention():
    uneven = MODEL.model_copy(update={"num_heads": 26, "num_kv_heads": 26, "hidden": 26 * 128})
    plan = plan_batch(job(model=uneven), SKEWED)
    pairs = {costs.context: costs.stages[0].layer.forward.pair_s for costs in plan.costs}
    assert set(pairs) > {1, 4}
    assert pairs[4] == pytest.approx(pairs[1] * 7 / 26)


@pytest.mark.slow
def test_a_long_document_has_as_many_devices_as_share_its_heads_evenly_and_the_rest_work_beside_it():
    model = MODEL.model_copy(update={"num_heads": 26, "num_kv_heads": 26, "hidden": 26 * 128})
    plan = plan_batch(job(16, model=model), [120_000, *range(1_000, 4_000, 50)])
    (place,) = [place for place in plan.places if place.degree == 13]
    beside = [one for one in plan.places if one.begin_s == 0 and one is not place]
    busy = {one.first_device + index for one in beside for index in range(one.degree)}
    assert busy == {13, 14, 15}
    assert plan.layout.num_devices == 16
    assert plan.to_data()["devices"] == {"a": 16}
