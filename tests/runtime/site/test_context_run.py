"""A training whose processes share every sequence, from its job to a checkpoint that one process goes on from."""

from itertools import product

import pytest

from benchmarks.shared.jobs import two_sites
from farpipe.plan import Plan

pytestmark = pytest.mark.slow  # starts processes

JOB = (
    """\
[model]
hugging_face = "{model}"
[data]
source = "{text}"
held_out = 0.2
[training]
sequence_length = 12
global_batch = 8
microbatch_size = 2
num_steps = {steps}
precision = "fp32"
learning_rate = 1e-2
checkpoint_every_steps = 3
evaluate_every_steps = 3
"""
    + two_sites("zurich", "lugano", 2, latency="2 ms")
    + """\
[layout]
data = 1
tensor = 1
{layout}
[schedule]
method = "{method}"
"""
)
SHARED = 'pipeline = 2\nsites = ["zurich", "lugano"]\ncontext = 2'
ALONE = 'pipeline = 1\nsites = ["zurich"]\ncontext = 1'


@pytest.fixture
def steps(model, text_file, train):
    """`steps(name, layout, num_steps, *options)` of the training; lines of its metrics."""

    def begin(name, layout, num_steps, *options):
        method = "zb-h1" if layout == SHARED else "1f1b"
        fields = {"model": model.hugging_face, "text": text_file, "layout": layout, "steps": num_steps}
        return train(name, JOB.format(method=method, **fields), *options)

    return begin


def figures(lines):
    """(step, loss, norm, loss of held-out text, or 0) of every step."""
    return [(line["step"], line["loss"], line["grad_norm"], line["evaluation_loss"] or 0.0) for line in lines]


def test_shared_sequences_over_two_sites_train_as_one_process_does_and_leave_it_their_checkpoint(steps, tmp_path):
    begun = steps("shared", SHARED, 3)
    rest = steps("rest", ALONE, 6, "--resume", tmp_path / "shared")
    alone = steps("alone", ALONE, 6)
    assert [row[0] for row in figures(alone) if row[3]] == [2, 5]
    assert figures(begun + rest) == [pytest.approx(row, rel=1e-5) for row in figures(alone)]
    planned = Plan.load(tmp_path / "shared" / "plan.json").prediction.link_bytes
    for line, link in product(begun, ("zurich>lugano", "lugano>zurich")):
        assert line["link_bytes"][link] == planned[link] > 0
