"""A training whose processes share sequences or chunks of documents; one process goes on from its checkpoint."""

from itertools import product

import pytest

from benchmarks.shared.jobs import two_sites
from chunk_runs import write_documents
from farpipe.planning import Plan

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
JOB_ON_CHUNKS = (
    """\
[model]
hugging_face = "{model}"
[data]
source = "{text}"
packing = "elastic"
held_out = 0.2
[training]
sequence_length = 64
global_batch = 4
num_steps = {steps}
precision = "fp32"
learning_rate = 1e-2
checkpoint_every_steps = 2
evaluate_every_steps = 2
"""
    + two_sites("zurich", "lugano", 2, latency="2 ms")
    + """\
[layout]
{layout}
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


def test_shared_chunks_over_two_sites_train_as_one_process_does_and_leave_it_their_checkpoint(model, train, tmp_path):
    text = write_documents(tmp_path / "text")  # of 1 to 64 tokens, odd numbers among them

    def steps(name, layout, num_steps, *options):
        fields = {"model": model.hugging_face, "text": text, "layout": layout, "steps": num_steps}
        return train(name, JOB_ON_CHUNKS.format(**fields), *options)

    begun = steps("shared", SHARED, 2)
    rest = steps("rest", ALONE, 4, "--resume", tmp_path / "shared")
    alone = steps("alone", ALONE, 4)
    assert [row[0] for row in figures(alone) if row[3]] == [1, 3]
    assert figures(begun + rest) == [pytest.approx(row, rel=1e-5) for row in figures(alone)]
    plan = Plan.load(tmp_path / "shared" / "plan.json")
    assert plan.layout.context == 2
    for line, link in product(begun, ("zurich>lugano", "lugano>zurich")):
        assert line["link_bytes"][link] > 0
