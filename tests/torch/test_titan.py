"""The job of torchtitan that a plan makes of a user's; its Trainer itself is run by benchmarks/engine/titan.py."""

from dataclasses import dataclass

import pytest

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.torch.titan import _cut
from job_files import OF_A_LOOP


@dataclass
class Parallelism:
    """The settings of torchtitan's that matter."""

    pipeline_parallel_degree: int = 2
    pipeline_parallel_schedule: str = "GPipe"
    pipeline_parallel_schedule_csv: str | None = "order.csv"
    module_fqns_per_model_part: list[list[str]] | None = None


@pytest.fixture(scope="module")
def plan():
    return planning.plan(parse_job(OF_A_LOOP))


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
