import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, Data, LocalSteps, Lora, Training, preset_site
from farpipe.core.spec.model import Experts
from farpipe.planning import PlanDocument
from farpipe.planning.planner.batches import plan_batch
from farpipe.planning.planner.chunked import plan_lengths
from farpipe.planning.planner.engine import TRAINABLE, batch_obstacle, groups_documents, plan_obstacle, within_engine
from farpipe.report.shown import show_plan
from planning.planner.jobs import TRAINING, job, measured_chunks, site


def test_what_is_open_is_pinned_to_what_the_engine_can_run_and_said():
    pinned, told = within_engine(job([site("a")]))
    assert told == "layout.tensor = 1"
    assert plan_obstacle(planning.plan(pinned)) == ("", "")


def test_a_pin_of_the_user_stays_and_is_the_obstacle():
    request = job([site("a")], tensor=2)
    pinned, told = within_engine(request)
    assert (pinned, told) == (request, "")
    assert plan_obstacle(planning.plan(pinned))[0] == "tensor = 2"


@pytest.fixture
def of_transformers(tmp_path):
    """`of_transformers(type, **pins)`: a job whose model is of that type of transformers."""

    def make(kind, training=TRAINING, **pins):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        request = job([site("a")], training=training, **pins)
        changed = request.model.model_copy(update={"hugging_face": str(tmp_path)})
        return request.model_copy(update={"model": changed})

    return make


def test_layers_of_tested_models_are_divided_by_plan_and_train_alike(of_transformers):
    from farpipe.engine.launch.runs import run_spec_of

    divided = TRAINING.model_copy(update={"sequence_parallel": True})
    request = of_transformers("qwen3", divided, tensor=2)
    assert within_engine(of_transformers("qwen3", divided))[1] == "", "the planner chooses"
    assert within_engine(of_transformers("qwen3"))[1] == "layout.tensor = 1", "without sequence parallelism none"
    plan = planning.plan(request)
    assert plan_obstacle(plan) == ("", "")
    assert run_spec_of(plan, num_steps=1).num_processes == 2 * plan.layout.data * plan.layout.pipeline


@pytest.mark.parametrize(
    ("kind", "training", "obstacle", "change"),
    [
        ("olmo", {"sequence_parallel": True}, "tensor = 2", "layout.tensor = 1"),
        (
            "llama",
            {"sequence_parallel": False},
            "training.sequence_parallel = false",
            "training.sequence_parallel = true",
        ),
    ],
)
def test_a_tensor_degree_that_the_engine_cannot_run_is_named(of_transformers, kind, training, obstacle, change):
    plan = planning.plan(of_transformers(kind, TRAINING.model_copy(update=training), tensor=2))
    assert plan_obstacle(plan) == (obstacle, change)


PLAIN = {"hugging_face": None, "gated_mlp": True, "norm": "rmsnorm", "positions": "rotary", "bias": False}
"""Of a model by numbers that is like a Mixtral, but for its experts."""


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", None])
def test_experts_are_shared_by_plan_and_train_alike(of_transformers, kind):
    from farpipe.engine.launch.runs import run_spec_of

    request = of_transformers(kind or "mixtral", tensor=1, data=2)
    changes = {"experts": Experts(num_experts=4, per_token=2, ffn_hidden=512)}
    model = request.model.model_copy(update=changes | ({} if kind else PLAIN))
    layout = request.layout.model_copy(update={"expert": 2})
    plan = planning.plan(request.model_copy(update={"model": model, "layout": layout}))
    assert plan_obstacle(plan) == ("", "")
    run = run_spec_of(plan, num_steps=1)
    assert run.is_divided
    assert run.plan.expert == run.num_sharing == 2


@pytest.mark.parametrize(
    ("kind", "pins", "obstacle"),
    [
        ("mixtral", {"data": 1, "expert": 2}, ("", "")),
        ("mixtral", {"data": 2, "expert": 4}, ("", "")),
        ("mixtral", {"data": 1, "expert": 1}, ("experts that layout.tensor = 2 processes divide", "layout.expert = 2")),
        ("mixtral", {"data": 2, "expert": 2}, ("experts that layout.tensor = 2 processes divide", "layout.tensor = 1")),
        ("olmoe", {"data": 1, "expert": 2}, ("tensor = 2", "layout.tensor = 1")),
    ],
)
def test_experts_beside_divided_layers_are_whole(of_transformers, kind, pins, obstacle):
    request = of_transformers(kind, TRAINING.model_copy(update={"sequence_parallel": True}), tensor=2)
    num_experts = 6 if pins["expert"] == pins["data"] == 2 else 4
    experts = {"experts": Experts(num_experts=num_experts, per_token=2, ffn_hidden=512)}
    changes = {"model": request.model.model_copy(update=experts), "layout": request.layout.model_copy(update=pins)}
    request = request.model_copy(update=changes)
    assert plan_obstacle(planning.plan(request)) == obstacle
    is_open = request.model_copy(update={"layout": request.layout.model_copy(update={"tensor": None})})
    assert "layout.tensor = 1" in within_engine(is_open)[1]


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        (
            {"sliding_window": 64},
            "MixtralForCausalLM of transformers, which is most like it, has no model.sliding_window",
        ),
        ({"gated_mlp": False}, "has no model.gated_mlp"),
    ],
)
def test_experts_by_numbers_that_no_class_has_are_named(changes, obstacle):
    request = job([site("a")], tensor=1)
    experts = {"experts": Experts(num_experts=4, per_token=2, ffn_hidden=512)}
    model = request.model.model_copy(update=PLAIN | experts | changes)
    layout = request.layout.model_copy(update={"expert": 1})
    plan = planning.plan(request.model_copy(update={"model": model, "layout": layout}))
    assert obstacle in plan_obstacle(plan)[0]
    assert plan_obstacle(plan)[1] == "model.hugging_face, the folder of such a model"


@pytest.mark.parametrize(
    ("kind", "pins", "training", "obstacle", "change"),
    [
        ("olmo", {"context": 2}, {}, "context = 2", "layout.context = 1"),
        (
            "llama",
            {"context": 2, "context_exchange": "ring"},
            {},
            'context_exchange = "ring"',
            'layout.context_exchange = "ulysses"',
        ),
        ("phimoe", {"expert": 2, "data": 2}, {}, "expert = 2", "layout.expert = 1"),
        (
            "mixtral",
            {"expert": 2, "data": 2},
            {"lora": Lora(rank=8, target_modules=("q_proj",))},
            "expert = 2",
            "layout.expert = 1",
        ),
        ("llama", {"context": 2}, {"lora": Lora(rank=8)}, "context = 2", "layout.context = 1"),
        (
            "llama",
            {},
            {"lora": Lora(rank=8, dropout=0.1, base_weights="nf4")},
            'training.lora.base_weights = "nf4"',
            'training.lora.base_weights = "same"',
        ),
        ("llama", {}, {"lora": Lora(rank=8), "zero": 3}, "training.zero = 3", "training.zero = 1"),
        (
            "mixtral",
            {"expert": 1},
            {"lora": Lora(rank=8)},
            "adapters beside experts",
            'training.lora.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]',
        ),
    ],
)
def test_what_no_model_is_trained_with_is_refused_by_plan_and_train_alike(
    of_transformers, capsys, kind, pins, training, obstacle, change
):
    from farpipe.engine.launch.runs import run_spec_of

    request = of_transformers(kind, TRAINING.model_copy(update=training), tensor=1)
    experts = Experts(num_experts=4, per_token=2, ffn_hidden=512) if "expert" in pins else None
    model, layout = request.model.model_copy(update={"experts": experts}), request.layout.model_copy(update=pins)
    request = request.model_copy(update={"model": model, "layout": layout})
    assert within_engine(request)[0].layout == request.layout, "what the user has pinned stays"
    plan = planning.plan(request)
    show_plan(PlanDocument(plan=plan), Console(width=300))
    shown = capsys.readouterr().out
    assert f"farpipe's engine can't run this plan yet ({obstacle}); with {change} in the job it can." in shown
    with pytest.raises(InputError) as refused:
        run_spec_of(plan, num_steps=1)
    assert str(refused.value) == f"the engine can't run this yet, only plan it: {obstacle}; plan again with {change}"


LONG = TRAINING.model_copy(update={"sequence_length": 32768, "global_batch": 2})


@pytest.mark.parametrize(
    ("kind", "training", "pins", "told"),
    [
        ("llama", LONG, {}, 'layout.tensor = 1, layout.context_exchange = "ulysses"'),
        (
            "qwen3",
            LONG.model_copy(update={"sequence_parallel": "auto"}),
            {},
            'layout.context_exchange = "ulysses"',
        ),
        ("mixtral", TRAINING, {"context": 2, "data": 1}, 'layout.tensor = 1, layout.context_exchange = "ulysses"'),
        ("olmo", LONG, {}, "layout.tensor = 1, layout.context = 1"),
    ],
)
def test_sequences_are_shared_where_the_engine_can_by_the_method_that_it_has(
    of_transformers, tmp_path, kind, training, pins, told
):
    from farpipe.engine.launch.runs import run_spec_of

    request, said = within_engine(of_transformers(kind, training, **pins))
    plan = planning.plan(request)
    assert said == told
    assert plan_obstacle(plan) == ("", "")
    plan.save(tmp_path / "plan.json")
    spec, at = run_spec_of(type(plan).load(tmp_path / "plan.json"), num_steps=1), plan.layout
    assert spec.num_processes == at.pipeline * at.data * at.tensor * at.context
    assert (at.context > 1) == (kind != "olmo")


def test_key_heads_that_the_degree_does_not_divide_are_refused_with_both_numbers(of_transformers):
    request = of_transformers("llama", tensor=1, context=2)
    few = request.model_copy(update={"model": request.model.model_copy(update={"num_kv_heads": 1})})
    assert within_engine(few)[0].layout == few.layout
    obstacle = "context = 2, which does not divide model.num_kv_heads = 1"
    assert plan_obstacle(planning.plan(few)) == (obstacle, "layout.context = 1")


def test_groups_of_several_degrees_run_at_one_site_for_models_whose_chunks_processes_share(of_transformers):
    sizes, pins = [60_000, 24_000, 9_000, 8_000, *[4_000] * 4, *range(500, 2_500, 50)] * 3, {"pipeline": 1}
    request = of_transformers("qwen3", **pins)
    wide = {"hidden": 4096, "num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "ffn_hidden": 11008}
    changed = {"data": Data(packing="elastic"), "model": request.model.model_copy(update=wide)}
    changed["training"] = Training(sequence_length=65536, global_batch=64, zero=1)
    request = request.model_copy(update=changed | {"cluster": Cluster(sites=(preset_site("a", "a100-80gb", 8),))})
    assert groups_documents(request)
    others = {"context": 1}, {"data": 2}, {"pipeline": 2}, {"tensor": 2}
    assert not any(groups_documents(with_pins(request, **pins | each)) for each in others)
    found = plan_batch(request, sizes)
    assert len(found.contexts) > 1
    assert batch_obstacle(request, found) == ("", "")
    assert batch_obstacle(request, replace(found, zero=3)) == (
        "training.zero = 3",
        "training.zero = 1, layout.tensor = 1",
    )
    plan, _ = plan_lengths(request, np.array(sizes), max(sizes))
    assert "each document over a group of the 8 devices (ulysses)" in plan.degrees
    assert plan.degrees in repr(plan)
    costs = plan_lengths(request, np.array(sizes), max(sizes), (measured_chunks(request),))[1].costs
    assert [one.context for one in costs] == [1, 2, 4, 8], "a profile of one device tells of groups as well"
    own = request.model_copy(update={"model": request.model.model_copy(update={"hugging_face": None})})
    assert not groups_documents(own)
    assert batch_obstacle(own, found)[0] == "groups of devices of several context degrees"


def with_pins(request, **pins):
    return request.model_copy(update={"layout": request.layout.model_copy(update=pins)})


def test_shared_sequences_are_pinned_away_only_where_the_planner_could_choose_them():
    long = TRAINING.model_copy(update={"sequence_length": 16384})
    assert within_engine(job([site("a")], training=long))[1] == "layout.tensor = 1, layout.context = 1"


def test_the_engine_refuses_what_the_filter_names():
    from farpipe.engine.launch.runs import run_spec_of

    with pytest.raises(InputError, match=r"tensor = 2; plan again with layout\.tensor = 1"):
        run_spec_of(planning.plan(job([site("a")], tensor=2)))


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("model", {"qk_norm": True}, "model.qk_norm"),
        ("model", {"sliding_window": 8}, "model.sliding_window"),
        ("training", {"dropout": True}, "training.dropout = true"),
        ("training", {"precision": "fp16"}, 'training.precision = "fp16"; plan again with training.precision = "bf16"'),
        ("training", {"zero": 3}, "training.zero = 3"),
        ("training", {"cuda_graphs": True}, "training.cuda_graphs = true"),
        (
            "training",
            {"zero_group_size": 4},
            "training.zero_group_size = 4; plan again with no training.zero_group_size",
        ),
        (
            "training",
            {"lora": Lora(rank=8, base_weights="fp8")},
            'training.lora.base_weights = "fp8"; plan again with training.lora.base_weights = "same"',
        ),
        ("training", {"local_steps": LocalSteps()}, "training.local_steps with no replicas at two sites"),
        (
            "training",
            {"activation_func_fp8_input_store": True},
            "training.activation_func_fp8_input_store = true; plan again with",
        ),
    ],
)
def test_what_only_the_cost_model_knows_is_refused(section, change, message):
    from farpipe.engine.launch.runs import run_spec_of

    plan = planning.plan(job([site("a")], tensor=1))
    changed = plan.job.model_copy(update={section: getattr(plan.job, section).model_copy(update=change)})
    with pytest.raises(InputError, match=f"can't run this yet, only plan it: {message}"):
        run_spec_of(plan.model_copy(update={"job": changed}))


def test_the_change_that_is_named_makes_a_plan_that_runs():
    from farpipe.engine.launch.runs import run_spec_of

    training = TRAINING.model_copy(update={"dropout": True})
    obstacle, change = plan_obstacle(planning.plan(job([site("a")], training=training, tensor=2)))
    assert obstacle == "tensor = 2, training.dropout = true"
    assert change == "layout.tensor = 1, training.dropout = false"
    runnable = planning.plan(job([site("a")], tensor=1))
    assert plan_obstacle(runnable) == ("", "")
    run_spec_of(runnable, num_steps=1)


def test_a_model_that_only_the_cost_model_knows_is_one_for_transformers():
    plan = planning.plan(job([site("a")], tensor=1))
    changed = plan.job.model_copy(update={"model": plan.job.model.model_copy(update={"qk_norm": True})})
    assert plan_obstacle(plan.model_copy(update={"job": changed})) == (
        "model.qk_norm",
        "model.hugging_face, the folder of such a model",
    )


def test_a_class_that_can_not_be_cut_into_stages_is_told_with_the_plan(of_transformers):
    change = "another type, or model.module with stages of your own"
    assert plan_obstacle(planning.plan(of_transformers("opt", TRAINING, tensor=1))) == ("a model of type 'opt'", change)


def test_narrow_weights_can_be_planned_but_are_not_read(of_transformers, tmp_path):
    request = of_transformers("qwen3", TRAINING, tensor=1)
    narrow = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(narrow))
    change = "a folder with 16-bit weights in model.hugging_face"
    assert plan_obstacle(planning.plan(request)) == ("weights in fp8 (quantization_config)", change)


def test_the_precisions_of_the_filter_are_those_of_the_engine():
    from farpipe.engine.stages.decoder import _DTYPES

    assert set(TRAINABLE) == set(_DTYPES)
