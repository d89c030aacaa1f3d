"""One planner decides the layout of a batch: never slower than pinned layouts, and it says why."""

from itertools import permutations

import numpy as np
import pytest

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.spec import Cluster, Job, Model, Pins, SiteLink, Training, preset_model, preset_site
from farpipe.planning.planner import batches
from farpipe.planning.planner.batches import plan_batch
from farpipe.planning.workload import BatchOptions, chunk_costs, plan_sequences
from farpipe.planning.workload.candidate_cuts import estimated_cuts
from farpipe.planning.workload.chunk import Chunk
from sound_chunks import check_chunks

MODEL = Model(num_layers=8, hidden=2048, num_heads=16, ffn_hidden=8192, vocab_size=32000)
LENGTHS = [30_000, 12_000, 9_000, 8_000, 4_000, 3_000, 3_000, 700, 700, 60]
MANY = LENGTHS * 6
WIDE = MODEL.model_copy(update={"hidden": 8192, "num_heads": 64, "ffn_hidden": 32768})


def job(gbit=100.0, devices=4, model=MODEL, memory=1.0, training=None, **pins):
    ends, rate = (("a", "b"), ("b", "a")), gbit * 1.25e8
    links = tuple(SiteLink(source=a, target=b, latency_s=0.01, bandwidth_bytes_per_s=rate) for a, b in ends)
    sites = [preset_site(name, "a100-80gb", devices) for name in "ab"]
    least = {"memory_bytes": sites[0].device.memory_bytes * memory}
    sites = [site.model_copy(update={"device": site.device.model_copy(update=least)}) for site in sites]
    return Job(
        model=model,
        training=Training(sequence_length=32768, global_batch=64, **(training or {})),
        cluster=Cluster(sites=tuple(sites), links=links),
        layout=Pins(**pins),
    )


@pytest.mark.slow
def test_the_choice_follows_bandwidth_and_the_sentence_names_the_runner_up():
    thin, wide = (plan_batch(job(gbit, devices=2, model=WIDE), LENGTHS * 2) for gbit in (10.0, 4000.0))
    assert thin.kind.startswith("pipeline over sites")
    assert wide.kind.startswith("replicas across sites")
    assert "to sum gradients" in thin.why
    for plan in (thin, wide):
        assert all(use in plan.why for use in ({other.use for other in plan.others} - {plan.use}))
        assert plan.step_s <= min(other.step_s for other in plan.others)
        assert len({plan.kind, *(other.kind for other in plan.others)}) == len(plan.others) + 1


@pytest.mark.slow
def test_groups_of_devices_are_told_beside_a_faster_plan_of_another_kind():
    plan = plan_batch(job(10.0, model=WIDE), LENGTHS * 2)
    alone = plan_batch(job(10.0, model=WIDE, sites=("a",)), LENGTHS * 2)
    assert plan.kind.startswith("pipeline over sites")
    assert alone.places
    assert min(other.step_s for other in plan.others if other.use == "one site") == pytest.approx(alone.step_s)
    assert f"groups of devices ({alone.degrees}) takes {alone.step_s / plan.step_s:.2f} times as long" in plan.why


@pytest.mark.slow
@pytest.mark.parametrize("gbit", [1.0, 20.0, 4000.0])
def test_no_pinned_layout_is_much_faster(gbit):
    free = plan_batch(job(gbit), MANY)
    tried = 0
    for replicas in ("inside", "across"):
        for tensor in (1, 2, 4):
            for context in (1, 2, 4):
                for data in (1, 2, 4, 8):
                    pins = {"replicas": replicas, "tensor": tensor, "context": context, "data": data}
                    try:
                        pinned = plan_batch(job(gbit, **pins), MANY)
                    except FarpipeError:
                        continue
                    tried += 1
                    assert free.step_s <= 1.03 * pinned.step_s, pins
    assert tried > 10


@pytest.mark.slow
def test_layouts_whose_slices_do_not_fit_do_not_keep_others_from_being_planned():
    """Two replicas of four stages are estimated fastest, hold no slices of such sequences, and take 530 s."""
    big = Model(num_layers=60, hidden=6656, num_heads=52, ffn_hidden=17920, vocab_size=32000)
    one_site = Cluster(sites=(preset_site("a", "a100-80gb", 32),))
    free = Job(model=big, training=Training(sequence_length=262144, global_batch=8), cluster=one_site)
    plan = plan_batch(free, [262144] * 2 + [100_000] * 6, BatchOptions(dynamic_context=False))
    assert plan.num_slices > 1
    assert plan.step_s < 210


def test_replicas_share_the_sequences_and_pins_hold():
    plan = plan_batch(job(replicas="across", tensor=2), MANY)
    data = plan.to_data()
    assert (data["tensor"], data["num_replicas"] % 2) == (2, 0)
    check_chunks([Chunk.from_data(chunk) for chunk in data["chunks"]], MANY)
    assert sorted(i for one in data["replicas"] for i in one) == list(range(len(data["pipelines"])))
    assert sorted(i for one in data["pipelines"] for i in one) == list(range(len(data["chunks"])))
    assert data["step_s"] == max(replica.step_s for replica in plan.replicas)


def unlike_sites(**pins):
    """A small device, four of these and a fast one, all linked; the links differ."""
    sites = [preset_site(*each) for each in (("a", "a100-40gb", 1), ("b", "a100-40gb", 4), ("c", "h100", 1))]
    rates = {("a", "b"): 10, ("a", "c"): 400, ("b", "c"): 1}
    links = [
        SiteLink(source=source, target=target, latency_s=0.02, bandwidth_bytes_per_s=gbit * 1.25e8)
        for ends, gbit in rates.items()
        for source, target in (ends, ends[::-1])
    ]
    return Job(
        model=MODEL.model_copy(update={"hidden": 4096, "num_heads": 32, "ffn_hidden": 16384}),
        training=Training(sequence_length=32768, global_batch=8),
        cluster=Cluster(sites=tuple(sites), links=tuple(links)),
        layout=Pins(**pins),
    )


@pytest.mark.slow
def test_no_pinned_order_of_sites_is_faster():
    lengths = [32768, 32768, 9_000, 4_000, 700]
    free, told = plan_batch(unlike_sites(), lengths), set()
    for count in (1, 2, 3):
        for sites in permutations("abc", count):
            try:
                pinned = plan_batch(unlike_sites(sites=sites), lengths)
            except FarpipeError:
                continue
            told.add(round(pinned.step_s, 3))
            assert free.step_s <= 1.01 * pinned.step_s, sites
    assert len(told) > 8, "orders differ"


def test_one_site_does_not_stand_for_another_kind_of_devices():
    with pytest.raises(InputError, match=r"identical sites: c and a differ in device \(h100-sxm, a100-40gb\)"):
        plan_batch(unlike_sites(sites=("c", "a"), replicas="across"), LENGTHS)


@pytest.mark.slow
def test_plans_of_all_kinds_have_all_documents():
    """A replica that is not the hardest by its documents may take longest."""
    plan = plan_batch(job(20.0, devices=2), LENGTHS)
    assert {one.num_tokens for one in (plan, *plan.others)} == {sum(LENGTHS)}
    assert len(plan.others) > 1


def test_several_stages_on_each_rank_may_be_pinned_alone():
    plan = plan_batch(job(devices=2, virtual=2), LENGTHS)
    assert plan.layout.layout.virtual == 2


@pytest.mark.slow
def test_the_same_batch_has_the_same_plan():
    first, second = (plan_batch(job(20.0, devices=2), LENGTHS).to_data() for _ in range(2))
    first["planning_s"] = second["planning_s"] = 0.0
    assert first == second


@pytest.mark.slow
def test_short_memory_is_kept_and_zero_3_is_taken_where_it_lets_the_batch_in():
    plan = plan_batch(job(4000.0, memory=0.14, replicas="across", pipeline=1, tensor=1), LENGTHS * 2)
    assert plan.zero == 3
    for replica in plan.replicas:
        for pipeline in replica.pipelines:
            for peak, rank in zip(pipeline.peak_memory_bytes, pipeline.problem.ranks, strict=True):
                assert peak <= rank.memory_bytes * (1 + 1e-9)


def test_whole_sequences_are_named_where_cutting_gains_nothing():
    plan = plan_batch(job(devices=1, sites=("a",)), np.full(16, 500), BatchOptions())
    assert plan.num_slices == 1
    assert plan.why.startswith("No chunks")


def test_pins_that_no_layout_keeps_say_why():
    with pytest.raises(FarpipeError, match="devices"):
        plan_batch(job(tensor=16), LENGTHS)


def test_an_action_under_zero_3_is_no_shorter_than_its_collectives():
    from farpipe.planning.workload.layout import chunk_layout

    pins = {"data": 4, "replicas": "inside", "sites": ("a",), "pipeline": 1}
    few = chunk_layout(job(training={"zero": 1}, model=WIDE, **pins), 4096).costs.stages[0].laws.forward
    beside, exposed = (
        chunk_layout(job(training={"zero": 3, "overlap": overlap}, model=WIDE, **pins), 4096)
        .costs.stages[0]
        .laws.forward
        for overlap in (True, False)
    )
    at = np.array([1.0, 1e6]), np.array([1.0, 1e6])
    assert few.seconds(*at)[0] < beside.least_s < few.seconds(*at)[1]
    assert beside.seconds(*at) == pytest.approx(np.maximum(few.seconds(*at), beside.least_s))
    assert exposed.seconds(*at) == pytest.approx(few.seconds(*at) + beside.least_s)


def test_replicas_that_end_before_the_hardest_are_cut_as_it_and_not_searched(monkeypatch):
    searched = []

    def search(costs, lengths, options):
        searched.append(lengths)
        return plan_sequences(costs, lengths, options)

    monkeypatch.setattr(batches, "plan_sequences", search)
    pins = {"sites": ("a",), "pipeline": 1, "tensor": 1, "context": 1, "data": 4}
    plan = plan_batch(
        job(training={"zero": 1}, **pins), [30_000, *LENGTHS[1:] * 3], BatchOptions(dynamic_context=False)
    )
    hardest, *others = plan.replicas
    assert len(others) == 3
    assert plan.step_s == hardest.step_s
    assert {other.cut for other in others} == {hardest.cut}
    assert len(searched) == 2  # the hardest, and once more with all of the budget


def test_the_estimate_counts_sums_of_gradients_that_share_a_link():
    """Gathers and sums of four stages, one after the other, are 1.5 of 2.4 s; the first stage's own are 0.5."""
    pins = {"replicas": "across", "sites": ("a", "b"), "pipeline": 4, "data": 2, "tensor": 1}
    costs = chunk_costs(job(10.0, **pins), max(LENGTHS))
    plan = plan_sequences(costs, LENGTHS)
    cuts = estimated_cuts(costs, np.array(LENGTHS), 1 << 20, BatchOptions())
    assert min(cut.seconds for cut in cuts) == pytest.approx(plan.step_s, rel=0.02)


@pytest.mark.slow
def test_the_solver_prints_nothing(capfd):
    """HiGHS says on stdout that it mends a solution of its simplified program, which is no JSON."""
    sites = [preset_site(name, "a100-40gb", 4) for name in "ab"]
    links = [SiteLink(source=a, target=b, latency_s=0.02, bandwidth_bytes_per_s=2.5e10) for a, b in ("ab", "ba")]
    short = Job(
        model=preset_model("llama-2-7b"),
        training=Training(sequence_length=32768, global_batch=8),
        cluster=Cluster(sites=tuple(sites), links=tuple(links)),
        layout=Pins(pipeline=4),
    )
    plan = plan_batch(short, [32768] * 3 + [20000, 9000, 700, 60, 1] * 3, BatchOptions(dynamic_context=False))
    assert any(pipeline.recomputed.any() for replica in plan.replicas for pipeline in replica.pipelines)
    assert capfd.readouterr().out == ""
