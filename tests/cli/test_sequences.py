"""`farpipe lengths` and `farpipe sequences plan` as a user calls them."""

import json
import re
from base64 import b64decode

import numpy as np
import pytest

from farpipe.planning.workload import Chunk
from job_files import EIGHT_LAYERS
from sound_chunks import check_chunks

JOB = f"""
{EIGHT_LAYERS}
[training]
sequence_length = 32768
global_batch = 16

[layout]
pipeline = 4

[[cluster.sites]]
name = "zurich"
device = "a100-80gb"
num_devices = 4
"""
LENGTHS = [40_000, 9_000, 8_000, 3_000, 3_000, 700, 700, 60, 1, 1]


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, LENGTHS)))
    return tmp_path / "job.toml"


def test_the_texts_that_are_trained_on_have_lengths(farpipe, job, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "four"}\n\n{"text": ""}\n{"text": "sixsix"}\n')
    assert json.loads(farpipe("lengths", "texts.jsonl", "--json").stdout)["num_tokens"] == len("four\n\n\n\nsixsix")
    job.write_text(f'{JOB}\n[data]\nsource = "{tmp_path / "texts.jsonl"}"\n')
    run = farpipe("lengths", "--job", job, "--json")
    assert json.loads(run.stdout)["longest"] == len("sixsix"), run.stderr
    assert farpipe("lengths").returncode == 2


@pytest.mark.slow
def test_lengths_show_shares_and_the_gain_of_chunks(farpipe, job):
    shown = farpipe("lengths", "lengths.txt", "--job", job, "--sample", 10)
    assert shown.returncode == 0, shown.stderr
    assert "10 sequences, 64,462 tokens" in shown.stdout
    assert "with every sequence whole" in shown.stdout
    data = json.loads(farpipe("lengths", "lengths.txt", "--json").stdout)
    assert data["num_tokens"] == sum(LENGTHS)
    assert {row["tokens"]: row["num_sequences"] for row in data["beyond"]}[2048] == 5


def test_a_batch_is_planned_as_json_and_as_tables(farpipe, job):
    done = farpipe("sequences", "plan", job, "--lengths", "lengths.txt", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    check_chunks([Chunk.from_data(chunk) for chunk in data["chunks"]], LENGTHS)
    keys = {"chunks", "pipelines", "recomputed_layers", "step_s", "peak_memory_bytes", "planning_s"}
    assert keys <= set(data)
    assert (data["num_stages"], data["devices_per_stage"], data["devices"]) == (4, 1, {"zurich": 4})
    assert (data["kind"], data["num_replicas"], data["replicas"]) == ("one site", 1, [[0]])
    assert data["is_trainable"]
    assert "1 of 10 sequences: more tokens than training.sequence_length (32,768)" in done.stderr
    options = ("--set", "slices=3", "--cut", 20000, "--html", "page.html")
    shown = farpipe("sequences", "plan", job, "--lengths", "lengths.txt", *options)
    assert (job.parent / "page.html").read_text().count("tokens 0 to") > len(LENGTHS)
    assert "the longest sequence in 3 slices" in shown.stdout
    assert "sequence_length" not in shown.stderr
    assert "4 stages of 1 device each, 4 devices in all: zurich (4)" in shown.stdout
    assert "can't run this plan" not in shown.stdout


def test_what_is_recomputed_of_a_layer_is_shown(farpipe, job):
    (job.parent / "long.txt").write_text("\n".join(map(str, [700_000, *[3_000] * 6])))
    options = ("--lengths", "long.txt", "--set", "slices=12")
    shown = farpipe("sequences", "plan", job, *options, "--html", "page.html")
    assert "(all but attention)" in shown.stdout, shown.stderr
    assert (
        "layers that all stages recompute of its chunk, but for their attention"
        in (job.parent / "page.html").read_text()
    )
    data = json.loads(farpipe("sequences", "plan", job, *options, "--json").stdout)
    assert data["keeps_attention"] == [True]
    assert np.any(data["recomputed_layers"])
    done = farpipe("sequences", "plan", job, *options, "--json", "--set", "checkpointing=full")
    assert json.loads(done.stdout)["keeps_attention"] == [False]


@pytest.mark.slow
def test_groups_of_devices_are_shown_with_the_documents_of_each_size(farpipe, job):
    wide = JOB.replace("hidden = 1024", "hidden = 4096").replace("num_devices = 4", "num_devices = 8")
    job.write_text(wide.replace("pipeline = 4", ""))
    lengths = [60_000, 24_000, 9_000, 8_000, *[4_000] * 4, *range(500, 2_500, 50)]
    (job.parent / "skewed.txt").write_text("\n".join(map(str, lengths)))
    shown = farpipe("sequences", "plan", job, "--lengths", "skewed.txt", "--html", "page.html")
    assert "one stage, groups of 1, " in shown.stdout, shown.stderr
    assert "Groups of devices, the largest first" in shown.stdout
    page = (job.parent / "page.html").read_text()
    assert "can't run this plan" in shown.stdout
    assert "run this plan: groups of devices of several context degrees" in page
    assert "A step takes " in page
    svg = b64decode(re.search(r'src="data:image/svg\+xml;base64,([^"]+)" alt="Devices"', page)[1]).decode()
    numbers = re.findall(r"forward of [^:]+: sequences? ([\d, ]+)<", svg)
    assert sorted(int(one) for chunk in numbers for one in chunk.split(", ")) == list(range(len(lengths)))
    assert page.count(">Chunk map<") == 4, "those of the groups that end last"
    assert "tokens of a document" in page
    data = json.loads(farpipe("sequences", "plan", job, "--lengths", "skewed.txt", "--json").stdout)
    assert len(data["groups"]) == len(data["replicas"])
    assert not data["is_trainable"]
    job.write_text(job.read_text().replace("[layout]", "[layout]\ncontext = 1\ntensor = 1"))
    data = json.loads(farpipe("sequences", "plan", job, "--lengths", "skewed.txt", "--json").stdout)
    assert (data["is_trainable"], data["groups"], data["devices_per_stage"]) == (True, [], 1)


def test_pins_that_chunks_can_not_keep_are_told(farpipe, job):
    text = job.read_text()
    job.write_text(text.replace("[training]", '[training]\nmicrobatch_size = 1\nrecompute = "full"'))
    shown = farpipe("sequences", "plan", job, "--lengths", "lengths.txt")
    assert "training.microbatch_size is not used: chunks have no such; leave it out" in shown.stdout
    data = json.loads(farpipe("sequences", "plan", job, "--lengths", "lengths.txt", "--json").stdout)
    assert data["unused"] == ["training.microbatch_size", "training.recompute"]
    job.write_text(text + '\n[data]\npacking = "elastic"\n')
    assert json.loads(farpipe("sequences", "plan", job, "--lengths", "lengths.txt", "--json").stdout)["unused"] == []
    job.write_text(job.read_text().replace("[training]", '[training]\nrecompute = "full"'))
    refused = farpipe("sequences", "plan", job, "--lengths", "lengths.txt")
    assert (refused.returncode, "each chunk recomputes the layers that it has to" in refused.stderr) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--lengths", "nowhere.txt"), 3, "nowhere.txt"),
        (("--lengths", "lengths.txt", "--sample", "11"), 3, "take fewer"),
        (("--lengths", "giant.txt"), 4, "does not fit in any number of slices"),
        (("--lengths", "wrong.txt"), 3, "wrong.txt:2"),
        (("--lengths", "lengths.txt", "--set", "devices_per_stage=8"), 4, "devices"),
    ],
)
def test_what_can_not_be_planned_says_why(farpipe, job, tmp_path, arguments, code, message):
    (tmp_path / "giant.txt").write_text("5\n900000000\n")
    (tmp_path / "wrong.txt").write_text("5\nlong\n")
    done = farpipe("sequences", "plan", job, *arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr


def test_lengths_refuses_options_of_a_job_without_one(farpipe, job):
    assert farpipe("lengths", "lengths.txt", "--sample", 4).returncode == 2
