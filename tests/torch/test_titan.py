"""The job of torchtitan that a plan makes of a user's; its Trainer itself is run by benchmarks/engine/titan.py."""

from dataclasses import dataclass

import pytest

from farpipe.errors import InputError
from farpipe.plan import make_plan
from farpipe.spec import parse_job
from farpipe.torch.titan import _cut
from job_files import cluster_text

JOB = f"""
[model]
name = "small"
num_layers = 4
hidden = 256
num_heads = 8
ffn_hidden = 1024
vocab_size = 2048
[training]
sequence_length = 256
global_batch = 8
microbatch_size = 1
precision = "fp32"
{cluster_text("west", "east", latency="2 ms", bandwidth="400 Mbit/s")}
[layout]
sites = ["west", "east"]
virtual = 1
"""


@dataclass
class Parallelism:
    """The settings of torchtitan's that matter."""

    pipeline_parallel_degree: int = 2
    pipeline_parallel_schedule: str = "GPipe"
    pipeline_parallel_schedule_csv: str | None = "order.csv"
    module_fqns_per_model_part: list[list[str]] | None = None


@pytest.fixture(scope="module")
def plan():
    return make_plan(parse_job(JOB))


def test_the_model_is_cut_as_planned_unless_the_job_says_where(plan):
    found = _cut(Parallelism(), plan, None, 4)
    first, second = found.module_fqns_per_model_part
    end = plan.placements[0].end_layer
    assert first == ["tok_embeddings", *(f"layers.{layer}" for layer in range(end))]
    assert second == [*(f"layers.{layer}" for layer in range(end, 4)), "norm", "lm_head"]
    assert (found.pipeline_parallel_schedule, found.pipeline_parallel_schedule_csv) == ("1F1B", "")
    named = Parallelism(module_fqns_per_model_part=[["tok_embeddings"], ["lm_head"]])
    assert _cut(named, plan, None, 4).module_fqns_per_model_part == [["tok_embeddings"], ["lm_head"]]


@pytest.mark.parametrize(
    ("method", "name"), [("zb-2p", "1F1B"), ("interleaved", "Interleaved1F1B"), ("wave", "ZBVZeroBubble")]
)
def test_torchtitan_places_as_many_stages_as_the_order_needs(method, name):
    assert _cut(Parallelism(), None, method, 4).pipeline_parallel_schedule == name


def test_a_plan_for_another_model_or_number_of_ranks_is_refused(plan):
    with pytest.raises(InputError, match="the plan has 4 layers, the job of torchtitan 6"):
        _cut(Parallelism(), plan, None, 6)
    with pytest.raises(InputError, match="the plan has 2 pipeline ranks, the job of torchtitan 4"):
        _cut(Parallelism(pipeline_parallel_degree=4), plan, None, 4)
