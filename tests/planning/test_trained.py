"""No plan that `train` refuses without the word in its verdict; beside it the fastest plan that it runs."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.spec import load_job, parse_job
from farpipe.engine.launch.runs import run_spec_of
from farpipe.planning import find
from farpipe.planning.explain import explained, with_fastest
from farpipe.planning.explain.trained import engine_words
from farpipe.planning.planner.engine import plan_obstacle, within_engine

ROOT = Path(__file__).parents[2]
JOB = """
[model]
num_layers = 8
hidden = 2048
num_heads = 16
num_kv_heads = 4
ffn_hidden = 8192
vocab_size = 4096
{model}
[training]
sequence_length = 2048
global_batch = 32
precision = "bf16"
{training}
[[cluster.sites]]
name = "zurich"
device = "h100"
num_devices = 8
{sites}
[layout]
{layout}
"""
PLAIN = {"model": "", "training": "", "layout": "", "sites": ""}
EXPERTS = "experts = { num_experts = 8, per_token = 2, ffn_hidden = 2048 }"
TRAINED = {
    "plain": {},
    "module": {"model": 'module = "stages:build"'},
    "norms": {"training": 'recompute = "layernorm"'},
    "experts": {"model": EXPERTS},
    "adapters": {"training": 'lora = { rank = 8, target_modules = ["linear_qkv"] }'},
    "adapters with dropout": {"training": "lora = { rank = 8, dropout = 0.1 }"},
    "dropout": {"model": 'module = "stages:build"', "training": "dropout = true"},
}
REFUSED = {
    "tensor": {"layout": "tensor = 2"},
    "ring": {"layout": "context = 2"},
    "expert parallelism": {"model": EXPERTS, "layout": "expert = 2\ndata = 2"},
    "dropout of no known layers": {"training": "dropout = true"},
    "fp8": {"training": 'matmul = "fp8"'},
    "zero 3": {"training": "zero = 3", "layout": "data = 2"},
    "biases": {"training": "moe_router_bias_update_rate = 0.001"},
}
FOLDERS = {"mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}, "llama": {}}


def job_of(parts):
    return load_job(parse_job(JOB.format(**PLAIN | parts), "the job"))


FAR_FROM_TRAIN = """
[model]
preset = "llama-3-70b"
[training]
sequence_length = 32768
global_batch = 8
[[cluster.sites]]
name = "zurich"
device = "h100"
num_devices = 128
"""
"""So few sequences that all devices work only where several share a layer."""


def job_of_folder(name, layout, folder, **changes):
    shape = {"num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 2048, "vocab_size": 4096}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 4, "model_type": name, **FOLDERS[name], **changes}
    (folder / "config.json").write_text(json.dumps(shape))
    text = JOB.format(**PLAIN | {"layout": layout})
    begin, end = text.index("num_layers"), text.index("[training]")
    return load_job(parse_job(f'{text[:begin]}hugging_face = "{folder}"\n{text[end:]}', "the job"))


def by_train(job):
    """What the explanation says that train runs instead, after it is sure that train itself says the same."""
    document = explained(find(job)[0])
    try:
        run_spec_of(document.plan)
        is_refused = False
    except InputError:
        is_refused = True
    assert ("Only an export can run it" in document.explanation.verdict) is is_refused
    assert (document.explanation.by_train is not None) is is_refused
    return document.explanation.by_train


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINED, *REFUSED])
def test_the_verdict_says_what_train_refuses(name):
    assert (by_train(job_of((TRAINED | REFUSED)[name])) is not None) is (name in REFUSED)


SECOND_SITE = """
[[cluster.sites]]
name = "lugano"
device = "h100"
num_devices = 8
[[cluster.links]]
source = "zurich"
target = "lugano"
latency = "6 ms"
bandwidth = "100 Gbit/s"
"""
ANY = {
    "model": ["", EXPERTS, 'module = "stages:build"', "sliding_window = 512", "qk_norm = true"],
    "training": [
        *("", "dropout = true", "zero = 3", "zero = 1", 'recompute = "layernorm"', 'recompute = "full"'),
        *('wire_type = "int8"', "lora = { rank = 8, dropout = 0.1 }", 'lora = { rank = 8, base_weights = "nf4" }'),
        *("lora = { rank = 8, target_modules = ['linear_qkv'] }", 'matmul = "fp8"', "elastic = true"),
        *(
            "local_steps = { steps = 10 }",
            "barrier = false",
            "sequence_parallel = true",
            "moe_router_bias_update_rate = 0.001",
        ),
    ],
    "layout": [
        *("", "tensor = 2", "context = 2", "data = 2", "pipeline = 2", "tensor = 2\ndata = 1\nexpert = 2"),
        'replicas = "across"',
    ],
    "sites": ["", SECOND_SITE],
}
"""Any of them together, where the job allows it."""


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.fixed_dictionaries({part: st.sampled_from(lines) for part, lines in ANY.items()}), st.data())
def test_no_plan_that_train_refuses_is_without_the_word_in_its_verdict(parts, data):
    more = data.draw(st.sampled_from(ANY["training"]))
    if more.partition(" ")[0] != parts["training"].partition(" ")[0]:
        parts = parts | {"training": f"{parts['training']}\n{more}"}
    try:
        job = job_of(parts)
        find(job)
    except (InputError, InfeasibleError):  # of the job itself: it can't be planned
        assume(False)
    by_train(job)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "tensor = 2", "context = 2", "pipeline = 2"])
@pytest.mark.parametrize("name", [*FOLDERS])
def test_the_verdict_says_what_train_refuses_of_a_model_of_transformers(name, layout, tmp_path):
    by_train(job_of_folder(name, layout, tmp_path))


def test_a_mixtral_is_planned_for_train_with_experts_as_the_planner_likes(tmp_path):
    job = job_of_folder("mixtral", "pipeline = 1\ndata = 8", tmp_path)
    assert within_engine(job)[0].layout.expert is None
    run_spec_of(find(within_engine(job)[0])[0].plan)


def test_the_balancing_loss_is_refused_with_narrow_messages(tmp_path):
    job = job_of_folder(
        "mixtral", "pipeline = 2\ntensor = 1\ncontext = 1\nexpert = 1", tmp_path, output_router_logits=True
    )
    job = job.model_copy(update={"training": job.training.model_copy(update={"wire_type": "int8"})})
    found = by_train(job)
    assert found.obstacle == "training.wire_type with the loss that balances experts (output_router_logits)"
    assert found.change == 'training.wire_type = "none"'


def test_the_fastest_plan_that_train_runs_is_beside_the_fastest():
    best = find(load_job(ROOT / "recipes" / "three_sites_asymmetric.toml"))[0]
    assert plan_obstacle(best.plan)[0], "layers of large models are divided"
    document = explained(best)
    found, fastest = document.explanation.by_train, find(within_engine(best.plan.job)[0])[0].plan
    assert found.step_s == fastest.prediction.step_s >= best.plan.prediction.step_s
    assert found.fastest == str(fastest.degrees)
    assert found.fastest in document.explanation.verdict
    assert found.fastest in engine_words(found, best.plan.prediction.step_s)
    run_spec_of(fastest)
    first = explained(best, searches=False)
    assert first.explanation.by_train == found.model_copy(update={"step_s": None, "fastest": ""})
    assert with_fastest(first, best) == document


@pytest.mark.slow
def test_a_plan_that_train_is_far_from_is_told_by_a_quick_search():
    best = find(load_job(parse_job(FAR_FROM_TRAIN, "the job")))[0]
    document = explained(best)
    found, fastest = document.explanation.by_train, find(within_engine(best.plan.job)[0])[0].plan
    assert found.quick
    assert "a quick search found for it" in document.explanation.verdict
    assert found.step_s >= max(1.75 * best.plan.prediction.step_s, fastest.prediction.step_s * (1 - 1e-9))
    assert found.step_s <= 1.25 * fastest.prediction.step_s
