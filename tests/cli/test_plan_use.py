"""Lines of a plan besides its times: use of the devices, other frameworks' settings, files that are there."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from farpipe import planning
from farpipe.cli.output import check_folder, keep_earlier
from farpipe.cli.plan import plan as plan_command
from farpipe.cli.profile import _write as write_profile
from farpipe.core.document import Document
from farpipe.core.errors import InputError, RunError
from farpipe.core.spec import parse_job, preset_model
from farpipe.interop.megatron_flags import megatron_flags
from farpipe.interop.torchtitan_config import torchtitan_config
from farpipe.planning import PlanDocument
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.explain.device_use import use_of
from farpipe.report.shown import cost_line, of_a_device, show_plan, use_line
from job_files import cluster_text

GPT = """
[model]
preset = "gpt3-1.3b"
[training]
sequence_length = 2048
global_batch = 64
num_steps = 1000
microbatch_size = 1
{training}
{cluster}
[layout]
{layout}
[schedule]
method = "{method}"
"""


def plan(method="1f1b", layout="", training="", **cluster):
    """A plan of GPT-3 1.3B over two sites of two H100 each."""
    text = cluster_text(device="h100", num_devices=(2, 2), latency="2 ms", bandwidth="100 Gbit/s")
    return planning.plan(parse_job(GPT.format(method=method, layout=layout, training=training, cluster=text)))


PIPELINE = "pipeline = 4\ndata = 1\ntensor = 1"


@pytest.fixture(scope="module")
def pipeline():
    return plan(layout=f"{PIPELINE}\nvirtual = 1")


def test_the_use_of_devices_is_flops_by_hand(pipeline):
    use = use_of(pipeline)
    # 72 B L s h^2 (1 + s/6h + V/12hL), Korthikanti et al. 2022, appendix A
    flops = 72 * 64 * 24 * 2048 * 2048**2 * (1 + 2048 / (6 * 2048) + 50257 / (12 * 2048 * 24))
    assert use.step_flops == pytest.approx(flops, rel=2e-2)  # the vocabulary may be padded
    assert use.num_devices == 4
    assert use.peak_flops_per_s == pytest.approx(4 * 989e12, rel=1e-3)
    assert use.model_flops_utilisation == pytest.approx(use.flops_per_device_s / 989e12, rel=1e-3)
    tokens = 64 * 2048 * 1000
    assert use.device_hours(tokens) == pytest.approx(1000 * pipeline.prediction.step_s * 4 / 3600)
    assert "4 devices, " in use_line(pipeline)
    told = f"{100 * use.model_flops_utilisation:.1f} % with attention in full, as torchtitan counts it; "
    assert told + f"{100 * use.model_flops_utilisation * use.causal_share:.1f} %" in use_line(pipeline)
    assert cost_line(PlanDocument(plan=pipeline), None).startswith("1,000 steps of ")
    assert cost_line(PlanDocument(plan=pipeline), 1e12).startswith("1 T tokens in steps of ")


def test_the_peak_is_the_rate_of_the_products_in_use(pipeline):
    fp8 = pipeline.job.training.model_copy(update={"matmul": "fp8"})
    plan = pipeline.model_copy(update={"job": pipeline.job.model_copy(update={"training": fp8})})
    assert use_of(plan).peak_flops_per_s == pytest.approx(2 * use_of(pipeline).peak_flops_per_s, rel=1e-2)


def test_a_module_of_the_users_own_has_no_mfu_for_nobody_counts_its_flops(pipeline):
    job = pipeline.job.model_copy(update={"model": pipeline.job.model.model_copy(update={"module": "mine:build"})})
    assert "device_flops" in of_a_device(pipeline)
    assert of_a_device(pipeline.model_copy(update={"job": job})) == {"num_devices": 4}


def test_megatron_gets_the_layers_of_every_stage(pipeline):
    flags = megatron_flags(pipeline).splitlines()
    layers = [place.num_layers for place in pipeline.placements]
    layout = "|".join(f"t*{number}" for number in layers)
    assert f'--pipeline-model-parallel-layout "E{layout}L"' in flags
    assert "--pipeline-model-parallel-size 4" in flags
    assert "--num-layers 24" in flags
    assert sum(layers) == 24


def test_torchtitan_gets_every_layer_once(pipeline):
    config = tomllib.loads(torchtitan_config(pipeline))
    parts = config["parallelism"]["module_fqns_per_model_part"]
    names = [name for part in parts for name in part]
    assert names == ["tok_embeddings", *(f"layers.{index}" for index in range(24)), "norm", "output"]
    assert len(parts) == config["parallelism"]["pipeline_parallel_degree"] == 4
    assert config["training"]["local_batch_size"] == 64


def with_settings(found, recompute, model=None, **settings):
    """The plan with other settings, as if it had been found with them; exports look at nothing else."""
    expert = settings.pop("expert", 1)
    training = found.job.training.model_copy(update=settings)
    job = found.job.model_copy(update={"training": training, "model": model or found.job.model})
    places = tuple(replace(place, recompute=mode) for place, mode in zip(found.placements, recompute, strict=True))
    layout = replace(found.layout, expert=expert, sequence_parallel=True, zero=1)
    return found.model_copy(update={"job": job, "placements": places, "layout": layout})


def test_frameworks_get_operations_numbers_graphs_and_settings_that_the_planner_chose(pipeline):
    settings = {"matmul": "mxfp8", "cuda_graphs": True, "zero": "auto", "sequence_parallel": "auto"}
    found = with_settings(pipeline, ["layernorm mlp"] * 4, **settings)
    flags = megatron_flags(found).splitlines()
    assert "--recompute-granularity selective --recompute-modules layernorm mlp" in flags
    assert {"--bf16", "--fp8-format e4m3 --fp8-recipe mxfp8", "--cuda-graph-impl local"} <= set(flags)
    assert {"--sequence-parallel", "--use-distributed-optimizer"} <= set(flags)
    text = torchtitan_config(found)
    config = tomllib.loads(text)
    assert config["activation_checkpoint"] == {"mode": "full"}
    assert config["model"]["converters"] == ["quantize.linear.mx"]
    assert "torchtitan has no setting for CUDA graphs" in text
    light = tomllib.loads(torchtitan_config(with_settings(pipeline, ["layernorm"] * 4, matmul="fp8")))
    assert light["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert light["model"]["converters"] == ["quantize.linear.float8"]
    plain = with_settings(pipeline, ["none"] * 4)
    assert tomllib.loads(torchtitan_config(plain))["activation_checkpoint"] == {"mode": "none"}
    assert "recompute" not in megatron_flags(plain)


def test_stages_that_recompute_differently_get_what_fits_all_of_them(pipeline):
    flags = megatron_flags(with_settings(pipeline, ["layernorm mlp", "selective", "none", "none"]))
    assert (
        "# The plan's stages recompute differently (stages 0 layernorm mlp, stages 2-3 none, stages 1 selective)"
        in flags
    )
    assert "--recompute-granularity selective --recompute-modules core_attn layernorm mlp\n" in flags
    flags = megatron_flags(with_settings(pipeline, ["full", "layernorm", "none", "none"]))
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1\n" in flags


def test_frameworks_get_experts(pipeline):
    found = with_settings(pipeline, ["layernorm moe_act"] * 4, preset_model("mixtral-8x7b"), expert=4, matmul="fp8")
    flags = megatron_flags(found).splitlines()
    experts = {"--num-experts 8", "--moe-router-topk 2", "--expert-model-parallel-size 4", "--moe-grouped-gemm"}
    assert experts <= set(flags)
    assert "--fp8-format hybrid --fp8-recipe tensorwise" in flags, "delayed scaling can't recompute norms"
    assert "--recompute-granularity selective --recompute-modules layernorm moe_act" in flags
    config = tomllib.loads(torchtitan_config(found))
    assert config["parallelism"]["expert_parallel_degree"] == 4
    assert config["model"]["converters"] == ["quantize.linear.float8", "quantize.grouped_mm.float8"]


def test_a_v_is_refused_for_megatron_and_named_for_torchtitan():
    found = plan("zbv", f"{PIPELINE}\nvirtual = 2")
    with pytest.raises(InputError, match="can't run stages in a V"):
        megatron_flags(found)
    assert tomllib.loads(torchtitan_config(found))["parallelism"]["pipeline_parallel_schedule"] == "ZBVZeroBubble"


def test_a_plan_that_the_engine_cannot_run_says_so_and_what_to_change(pipeline, capsys):
    show_plan(PlanDocument(plan=pipeline), Console(width=200))
    assert "can't run" not in capsys.readouterr().out
    show_plan(PlanDocument(plan=plan(layout="pipeline = 2\ndata = 1\ntensor = 2")), Console(width=200))
    said = "farpipe's engine can't run this plan yet (tensor = 2); with layout.tensor = 1 in the job it can."
    assert said in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_a_typing_slip(tmp_path):
    check_folder(tmp_path / "plan.json", None)
    with pytest.raises(RunError, match=r"x\.json: can't be written: .* does not exist"):
        check_folder(tmp_path / "absent" / "x.json")


def test_an_earlier_plan_is_kept_and_another_file_is_not_touched(tmp_path, pipeline):
    path = tmp_path / "plan.json"
    assert keep_earlier(path, "plan") == ""
    pipeline.save(path)
    assert keep_earlier(path, "plan") == f"; the earlier one is now {tmp_path / 'plan.previous.json'}"
    assert path.samefile(tmp_path / "plan.previous.json"), "it keeps its name until the new one is whole"
    job = tmp_path / "job.toml"
    job.write_text("[model]")
    with pytest.raises(InputError, match=r"exists and is not a farpipe plan"):
        keep_earlier(job, "plan")
    assert job.read_text() == "[model]"


def test_a_file_that_is_no_plan_is_refused_before_anything_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr("farpipe.planning.planner.find.refine", lambda *_, **__: pytest.fail("it was planned first"))
    other = tmp_path / "notes.json"
    other.write_text("{}")
    job = Path(__file__).parents[2] / "recipes" / "two_sites.toml"
    with pytest.raises(InputError, match=r"exists and is not a farpipe plan"):
        plan_command(job=job, output=other)
    assert other.read_text() == "{}"


def test_a_profile_of_chunks_is_replaced_by_the_next_and_not_by_another_kind(tmp_path, capsys):
    path, found = tmp_path / "profile.json", ChunkProfileStandIn()
    for told in ("", f"; the earlier one is now {tmp_path / 'profile.previous.json'}"):
        write_profile(found, path, as_json=False, show=lambda: None)
        assert capsys.readouterr().out == f"profile written to {path}{told}\n"
    with pytest.raises(InputError, match=r"exists and is not a farpipe profile"):
        keep_earlier(path, "profile")


class ChunkProfileStandIn(Document):
    """A document of that format with nothing in it."""

    FORMAT = ChunkProfile.FORMAT

    def to_body(self):
        return {}
