"""A whole pipeline at each of several sites, and gradients that cross."""

import json
import re
from itertools import pairwise

import pytest

from attempts import assert_most_of_five_steps
from farpipe import planning
from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.spec import LocalLink, Lora, differing_keys, load_job
from farpipe.core.step import is_inter_site
from farpipe.core.units import format_bytes
from farpipe.engine.launch.runs import run_spec_of
from farpipe.planning import Plan
from job_files import cluster_text
from planning.planner.every_layout import candidates
from planning.planner.jobs import MODEL, TRAINING, both_ways, device, job, planned, site, why

PINS = {"pipeline": 2, "tensor": 1, "virtual": 1, "schedule": "1f1b"}


def across(gbit_per_s=100.0, latency_s=0.01, training=TRAINING, sites=None, **pins):
    places = sites or [site("a"), site("b")]
    links = [
        link
        for one, other in pairwise([*places, places[0]])
        for link in both_ways(one.name, other.name, latency_s, gbit_per_s)
    ]
    links = list({(link.source, link.target): link for link in links}.values())
    return job(places, links, training, **(PINS | {"replicas": "across", "data": len(places)} | pins))


def crossing_bytes(plan):
    return {name: size for name, size in plan.prediction.link_bytes.items() if is_inter_site(name)}


@pytest.mark.parametrize("data", [2, 4])
def test_every_gradient_crosses_once_each_way_whatever_the_number_of_replicas_at_a_site(data):
    plan = planning.plan(across(data=data))
    assert crossing_bytes(plan) == {"a>b": 4 * MODEL.num_params, "b>a": 4 * MODEL.num_params}
    assert plan.replicas == (("a", "a"),) * (data // 2) + (("b", "b"),) * (data // 2)
    assert (plan.sites, plan.where) == (("a", "a"), "a + b")


def test_with_zero1_gradients_cross_by_half_and_weights_come_back():
    plan = planning.plan(across(training=TRAINING.model_copy(update={"zero": 1})))
    assert crossing_bytes(plan)["a>b"] == pytest.approx((4 + 2) / 2 * MODEL.num_params)
    assert all(sync.gather and sync.reduce for sync in plan.problem.sync)


def test_three_sites_are_a_ring():
    plan = planning.plan(
        across(sites=[site("a"), site("b"), site("c")], training=TRAINING.model_copy(update={"global_batch": 24}))
    )
    assert set(crossing_bytes(plan)) == {"a>b", "b>c", "c>a"}
    assert crossing_bytes(plan)["c>a"] == pytest.approx(4 / 3 * 4 * MODEL.num_params)
    far = planning.plan(
        across(
            latency_s=0.11,
            sites=[site("a"), site("b"), site("c")],
            training=TRAINING.model_copy(update={"global_batch": 24}),
        )
    )
    assert far.prediction.step_s - plan.prediction.step_s == pytest.approx(0.1 * (4 + 1))  # four turns, and clipping


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c")])
def test_pinned_sites_are_a_ring_in_their_order(order):
    training = TRAINING.model_copy(update={"global_batch": 24})
    open_job = across(sites=[site(name) for name in "abc"], training=training)
    pins = open_job.layout.model_copy(update={"sites": order})
    plan = planning.plan(open_job.model_copy(update={"layout": pins}))
    assert [replica[0] for replica in plan.replicas] == list(order)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("gbit_per_s", [0.2, 5.0, 1000.0])
def test_an_exchange_runs_beside_compute_as_far_as_its_link_carries_it(zero, gbit_per_s):
    """All bytes count; what is hidden of all stages together is no more than the link carries in one stage's pass."""
    training = TRAINING.model_copy(update={"zero": zero})
    layers = (MODEL.num_layers // 2,) * 2
    over = planning.plan(across(gbit_per_s, training=training, layers=layers))
    bare = planning.plan(across(gbit_per_s, training=training.model_copy(update={"overlap": False}), layers=layers))
    link, stages = over.problem.links["a>b"], over.problem.stages
    for one, whole in zip(over.problem.collectives, bare.problem.collectives, strict=True):
        assert one.transfer.bytes == whole.transfer.bytes
        hidden_s = link.occupied_s(whole.transfer.bytes) - one.transfer.occupies_s
        stage = stages[one.stage]
        pass_s = stage.forward_s if one.kind == "gather" else stage.input_grad_s + stage.weight_grad_s
        assert 0 < hidden_s <= pass_s / len(stages) + 1e-12
        assert one.transfer.arrives_after_s == pytest.approx(one.transfer.occupies_s + link.latency_s)
    assert crossing_bytes(over) == crossing_bytes(bare)
    assert over.prediction.step_s < bare.prediction.step_s
    traffic_s = sum(link.occupied_s(one.transfer.bytes) for one in over.problem.collectives)
    assert over.prediction.makespan_s > traffic_s, "the link carries every byte within the step"


def test_replicas_that_the_sites_cannot_share_equally_are_refused():
    training = TRAINING.model_copy(update={"global_batch": 12})
    with pytest.raises(InfeasibleError, match=r"data and training\.global_batch must be multiples"):
        planning.plan(across(data=3, training=training))


def test_with_a_free_link_each_site_takes_its_half_of_the_batch():
    alone = planning.plan(job([site("a")], data=1, **PINS)).prediction.step_s
    assert 0.45 * alone < planning.plan(across(1e9, 0.0)).prediction.step_s < 0.8 * alone


def test_with_a_slow_link_the_exchange_sets_the_time():
    crossing = 4 * MODEL.num_params / (1e9 / 8)
    assert crossing < planning.plan(across(1.0)).prediction.step_s < 1.5 * crossing


def test_several_replicas_at_a_site_sum_inside_before_and_after():
    one, two = (
        planning.plan(
            across(data=data, num_microbatches=4, training=TRAINING.model_copy(update={"global_batch": 4 * data}))
        )
        for data in (2, 4)
    )
    assert one.prediction.makespan_s == two.prediction.makespan_s
    assert one.prediction.overhead_s < two.prediction.overhead_s


@pytest.mark.parametrize(("global_batch", "less"), [(256, "pipeline"), (512, "replicas")])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_pipelines_send_less_below_parameters_over_hidden(precision, global_batch, less):
    """Twice that with 2-byte activations and 4-byte gradients, just that when both have the same size."""
    sequences = global_batch if precision == "bf16" else global_batch // 2
    training = TRAINING.model_copy(update={"global_batch": sequences, "precision": precision, "microbatch_size": 1})
    both = device().model_copy(update={"peak_flops": {"bf16": 3e14, "fp32": 2e13}})
    sites = [site("a", on=both), site("b", on=both)]
    over = planning.plan(
        job(sites, both_ways("a", "b"), training, sites=("a", "b"), data=1, **PINS | {"replicas": "inside"})
    )
    each = planning.plan(across(sites=sites, training=training))
    sends = {"pipeline": max(crossing_bytes(over).values()), "replicas": max(crossing_bytes(each).values())}
    assert min(sends, key=sends.get) == less
    threshold = (2 if precision == "bf16" else 1) * MODEL.num_params / MODEL.hidden
    assert (training.tokens_per_step < threshold) == (less == "pipeline")


ADAPTERS = Lora(rank=16)


@pytest.mark.parametrize(
    ("changes", "pins"),
    [
        ({"global_batch": 256, "microbatch_size": 1}, {}),
        ({"global_batch": 16, "lora": ADAPTERS}, {}),
        ({"global_batch": 64, "zero": 1}, {}),
        ({"global_batch": 64, "microbatch_size": 1}, {"virtual": 2, "schedule": "interleaved"}),
        ({"global_batch": 64, "wire_type": "int8"}, {}),
    ],
)
def test_what_either_use_of_the_sites_is_said_to_send_is_what_it_sends(changes, pins):
    """Adapters alone are exchanged, a pipeline with several stages a rank crosses more often, messages are narrow."""
    training = TRAINING.model_copy(update=changes)
    links, either = both_ways("a", "b", 0.01, 10.0), {"sites": ("a", "b"), "tensor": 1, "virtual": 1, **pins}
    document = planned(job([site("a"), site("b")], links, training, **either))
    plan = document.plan
    line = next(line for line in document.explanation.advice if line.startswith(("Data parallelism", "A pipeline")))
    other, own, even = re.search(
        r"sends (.*) between sites, the plan (.*) \(equal at ([\d.,]+ ?M?) tokens", line
    ).groups()
    assert own == format_bytes(sum(plan.inter_site_bytes.values()))
    kind = {"replicas": "across", "data": 2} if line.startswith("Data") else {"replicas": "inside"}
    also = planning.plan(job([site("a"), site("b")], links, training, **either | kind))
    assert other == format_bytes(sum(also.inter_site_bytes.values()))
    sent = sorted((one.layout.replica_sites == (), sum(one.inter_site_bytes.values())) for one in (plan, also))
    tokens = float(even.replace(",", "").replace(" M", "e6"))
    assert tokens == pytest.approx(training.tokens_per_step * sent[0][1] / sent[1][1], rel=0.006)


def test_the_better_use_of_a_second_site_is_chosen_and_the_other_told():
    slow_and_far = job([site("a"), site("b")], both_ways("a", "b", 0.02, 1.0), data=2, **PINS)
    assert any(line.startswith("Data parallelism across a + b: at most") for line in why(slow_and_far).advice)
    many_tokens = TRAINING.model_copy(update={"global_batch": 1024, "microbatch_size": 4})
    far = job([site("a"), site("b")], both_ways("a", "b", 0.05, 10.0), many_tokens, tensor=1, schedule="1f1b")
    document = planned(far)
    told = document.explanation
    assert document.plan.where == "a + b"
    assert any(line.startswith("A pipeline over ") for line in told.advice)
    assert any(" > " in choice.what and "for the links between sites" in choice.reason for choice in told.runners_up)


@pytest.mark.slow
def test_only_sites_that_are_alike_have_replicas_and_that_is_said():
    places = [site("a"), site("b", on=device("h100-sxm", flops=989e12))]
    pinned = job(places, both_ways("a", "b"), replicas="across")
    with pytest.raises(InfeasibleError, match=r'layout\.replicas = "across": .* a and b differ in device'):
        planning.plan(pinned)
    assert any(
        line.startswith("Replicas at each of several")
        for line in why(job(places, both_ways("a", "b"), tensor=1)).advice
    )


def test_sites_without_a_link_are_not_called_unlike_and_are_named():
    places = [site("a"), site("b"), site("c")]
    with pytest.raises(InfeasibleError, match="links both ways: there is none from a to b"):
        planning.plan(job(places, replicas="across"))
    told = "c has no link both ways to another site, so its devices can only be used alone."
    assert told in why(job(places, both_ways("a", "b"), tensor=1, pipeline=2)).advice


def test_machines_larger_than_a_site_do_not_tell_sites_apart():
    large, small = site("a", 8), site("b", 4).model_copy(update={"devices_per_machine": 4})
    assert differing_keys(large, small) == []
    assert differing_keys(large, site("b", 8).model_copy(update={"devices_per_machine": 4})) == [
        "devices_per_machine (8, 4)"
    ]


def test_speeds_that_differ_are_told_with_units():
    slow = LocalLink(latency_s=5e-6, bandwidth_bytes_per_s=2.5e10)
    assert differing_keys(site("a"), site("b").model_copy(update={"machine_link": slow})) == [
        "machine_link (2.40 Tbit/s after 5.00 us, 200 Gbit/s after 5.00 us)"
    ]


def test_the_smaller_site_says_how_many_devices_are_used():
    places = [site(name, number).model_copy(update={"devices_per_machine": 2}) for name, number in (("a", 4), ("b", 2))]
    plan = planning.plan(across(sites=places, pipeline=None))
    assert plan.layout.pipeline * plan.layout.devices_per_rank <= 2


def test_inside_keeps_the_replicas_of_a_rank_together():
    request = job([site("a"), site("b")], both_ways("a", "b"), replicas="inside", tensor=1)
    assert not any(c.layout.replica_sites for c in candidates(request))
    assert all(c.layout.replica_sites for c in candidates(across()))


def test_a_plan_survives_its_file_and_a_wrong_one_is_refused(tmp_path):
    plan = planning.plan(across(data=4))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    data = json.loads(plan.to_json())
    data["layout"]["replica_sites"] = "a"
    with pytest.raises(InputError, match="replica_sites"):
        Plan.from_json(json.dumps(data))


@pytest.mark.slow
@pytest.mark.alone
def test_a_plan_with_replicas_at_two_sites_runs_as_simulated(tmp_path):
    """The median of five steps is within a quarter: the steps are short, and the processes more than the cores."""
    from farpipe.core.simulate import Timeline
    from farpipe.core.simulate.timeline import MESSAGE_KINDS
    from farpipe.engine.launch.run import run

    (tmp_path / "job.toml").write_text(TINY)
    plan = planning.plan(load_job(tmp_path / "job.toml"))
    assert plan.where == "east + west"
    spec = run_spec_of(plan, num_steps=7, device="sleep")
    assert spec.plan.replicas == (("east", "east"), ("west", "west"))
    predicted_s = plan.prediction.makespan_s
    assert_most_of_five_steps(
        lambda: run(spec, tmp_path / "run"),
        tmp_path / "run",
        lambda step: abs(predicted_s / step["makespan_s"] - 1) < 0.25,
    )
    timeline = Timeline.load(tmp_path / "run" / "timeline.json")
    reduces = [m for m in timeline.messages if MESSAGE_KINDS[m["kind"]] == "reduce"]
    assert sum(m["bytes"] for m in reduces) == pytest.approx(crossing_bytes(plan)["east>west"], rel=0.01)


TINY = f"""
[model]
preset = "tiny"
[training]
sequence_length = 64
global_batch = 16
microbatch_size = 1
num_steps = 5
precision = "fp32"
zero1 = false
{cluster_text("east", "west", num_devices=(2, 2), latency="20 ms")}
[layout]
pipeline = 2
tensor = 1
virtual = 1
replicas = "across"
"""
