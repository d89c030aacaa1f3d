"""What a submitter may write, and what would read a file, import code or listen on the operator's machine."""

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec.load import parse_job
from farpipe.service.submission import MOST_BYTES, submitted_job

JOB = """
[model]
preset = "llama-3.2-1b"
[training]
sequence_length = 2048
global_batch = 64
precision = "bf16"
[data]
source = "stdlib"
[schedule]
method = "1f1b"
[[cluster.sites]]
name = "anywhere"
device = "h100"
num_devices = 2
network = "10 Gbit/s"
"""


def test_a_job_that_names_no_file_is_taken_as_it_is():
    text = JOB.replace('network = "10 Gbit/s"\n', "")
    assert submitted_job(text) == parse_job(text)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('preset = "llama-3.2-1b"', 'hugging_face = "secret"', "model.hugging_face: 'secret' names a file"),
        ('preset = "llama-3.2-1b"', 'name = "../../etc/passwd"', "model.name: .* names a file"),
        ('source = "stdlib"', 'source = "mine.txt"', "data.source: 'mine.txt' is a file here; leave it 'stdlib'"),
        ('source = "stdlib"', 'tokenizer = "tokenizer.json"', "data.tokenizer: .* leave it 'bytes'"),
        ('source = "stdlib"', 'cache = "x"', "data.cache: 'x' names a file"),
        ('method = "1f1b"', 'method = "mine.py:order"', "schedule.method: 'mine.py:order' names a file"),
        ('method = "1f1b"', 'method = "package:order"', "schedule.method: 'package:order' names a file"),
        ("[schedule]", '[metrics]\nprometheus_host = "0.0.0.0"\n[schedule]', "metrics.: the operator's choice"),
        ("[schedule]", "[run]\nmax_restarts = 9\n[schedule]", "run.: the operator's choice"),
        ("[schedule]", '[cluster.matrices]\nthroughput = "a.csv"\n[schedule]', "cluster.matrices: names files"),
        ("[schedule]", "[hat]\n[schedule]", "hat.: the operator's choice"),
    ],
)
def test_what_a_submitter_may_not_choose_is_refused_before_anything_is_read(monkeypatch, old, new, says):
    monkeypatch.setattr("farpipe.service.submission.parse_job", None)
    assert old in JOB
    with pytest.raises(InputError, match=says):
        submitted_job(JOB.replace(old, new))


def test_a_long_job_is_refused():
    with pytest.raises(InputError, match="the most is 262,144"):
        submitted_job(JOB + "#" * MOST_BYTES)
