"""Activations that wait in the host's memory: what a job may say of them."""

import pytest

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from job_files import EIGHT_LAYERS

JOB = f"""
{EIGHT_LAYERS}
[training]
sequence_length = 1024
global_batch = 16
{{training}}
[[cluster.sites]]
name = "a"
device = "h100"
num_devices = 8
[layout]
{{layout}}
"""


@pytest.mark.parametrize(
    ("training", "layout", "message"),
    [
        ("cpu_offloading_num_layers = 9", "", "custom has 8 layers"),
        ("cpu_offloading_num_layers = 4", "pipeline = 2", "only in pipelines of one rank; set layout.pipeline = 1"),
        ("cpu_offloading_num_layers = 4", "virtual = 2", "only in pipelines of one rank"),
        ('cpu_offloading_num_layers = 4\nrecompute = "full"', "", 'set recompute = "none"'),
        ("cpu_offloading_num_layers = 4\ncuda_graphs = true", "", "set cuda_graphs = false"),
    ],
)
def test_what_does_not_go_with_offloading_is_an_input_error_with_its_place(training, layout, message):
    with pytest.raises(InputError, match=message):
        parse_job(JOB.format(training=training, layout=layout))


def test_plans_with_offloading_have_one_stage_and_compute_nothing_again():
    plan = planning.plan(parse_job(JOB.format(training="cpu_offloading_num_layers = 4", layout="")))
    assert (plan.layout.pipeline, plan.layout.virtual) == (1, 1)
    assert set(plan.recompute) == {"none"}
