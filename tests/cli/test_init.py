"""`farpipe init`: a job from a few words."""

import json
import sys

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import load_job, parse_job
from farpipe.core.spec.first import first_job

SITES = "zurich=8xh100,lugano=16xa100"


def test_a_job_from_a_few_words_is_planned(farpipe, tmp_path):
    done = farpipe("init", "--model", "llama-3-8b", "--sites", SITES, "--link", "20ms,100G")
    assert done.returncode == 0
    job = load_job(tmp_path / "job.toml")
    assert [(site.name, site.num_devices) for site in job.cluster.sites] == [("zurich", 8), ("lugano", 16)]
    assert job.cluster.link("zurich", "lugano").latency_s == 0.02
    assert job.cluster.link("lugano", "zurich").bandwidth_bytes_per_s == 12.5e9
    assert job.text in done.stdout
    assert "llama-3-8b: use" in done.stdout
    assert "Next: farpipe plan job.toml" in done.stdout


def test_what_was_not_given_is_marked():
    text = first_job("llama-3-8b", ["a=8xh100"], global_batch=64)
    assumed = [line.split(" =")[0] for line in text.splitlines() if line.endswith("assumed")]
    assert assumed == ["sequence_length", "precision"]
    assert parse_job(text).training.global_batch == 64


def test_one_link_may_differ():
    job = parse_job(first_job("tiny", ["a=2xcpu", "b=2xcpu,c=1xcpu"], ["20ms,100 Mbit/s", "c:a=same-region"]))
    assert job.cluster.link("a", "b").bandwidth_bytes_per_s == 12.5e6
    assert job.cluster.link("a", "c").latency_s != 0.02
    assert job.training.precision == "fp32"


@pytest.mark.parametrize(
    ("model", "sites", "links", "message"),
    [
        ("llama-3-8", "a=8xh100", [], "model: 'llama-3-8' is neither .* did you mean 'llama-3-8b'"),
        ("tiny", "a=8h100", [], "expected NAME=COUNTxDEVICE such as zurich=8xh100, found 'a=8h100'"),
        ("tiny", "a=0xh100", [], "expected NAME=COUNTxDEVICE such as zurich=8xh100, found 'a=0xh100'"),
        ("tiny", "a=8xh1000", [], "a: there is no device 'h1000'; did you mean 'h200'"),
        ("tiny", "", [], "sites: give at least one"),
        ("tiny", "a=8xh100,b=8xh100", [], "give the one between a and b, as 20ms,100G"),
        ("tiny", "a=8xh100,b=8xh100", ["20,100G"], 'expected a quantity with its unit such as "20 ms"'),
        ("tiny", "a=8xh100,b=8xh100", ["moon"], "expected LATENCY,BANDWIDTH such as 20ms,100G, or a preset"),
        ("tiny", "a=8xh100,b=8xh100", ["a:c=2ms,1G"], "'a:c' is no pair of sites; expected one of a:b"),
        ("tiny", "a=8xh100,b=8xh100", ["2ms,1G", "3ms,1G"], "'3ms,1G': one was given for all pairs"),
        ("tiny", "a=8xh100", ["2ms,1G"], "there is one site, so no link"),
        ("tiny", "a=8xh100,a=8xh100", ["2ms,1G"], "sites: there is already a site called 'a'; give each"),
    ],
)
def test_a_word_that_can_not_be_read_is_named(model, sites, links, message):
    with pytest.raises(InputError, match=message):
        first_job(model, [sites], links)


def test_without_a_terminal_a_missing_word_is_named(farpipe, tmp_path):
    done = farpipe("init", "--model", "tiny")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--sites is missing; for example --sites zurich=8xh100,lugano=8xh100" in done.stderr
    assert not (tmp_path / "job.toml").exists()


def test_an_error_names_the_option(farpipe):
    done = farpipe("init", "--model", "tiny", "--sites", "a=8")
    assert done.returncode == 3
    assert "farpipe: --sites: expected NAME=COUNTxDEVICE" in done.stderr


def test_no_file_is_overwritten(farpipe, tmp_path):
    (tmp_path / "job.toml").write_text("mine")
    done = farpipe("init", "--model", "tiny", "--sites", "a=2xcpu")
    assert done.returncode == 3
    assert "exists already" in done.stderr
    assert (tmp_path / "job.toml").read_text() == "mine"


def test_on_a_terminal_it_asks_for_what_is_missing(farpipe, monkeypatch, tmp_path):
    answers = iter(["a=2xcpu,b=2xcpu", "20ms,100M"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda question, default, err: next(answers) or default)
    assert farpipe("init", "--model", "tiny").returncode == 0
    assert load_job(tmp_path / "job.toml").cluster.sites[1].name == "b"


WORDS = ("--model", "llama-3-8b", "--sites", SITES, "--link", "20ms,100G")


def figures(done):
    """What `plan --json` prints, without the seconds that it took and the text of the job."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"search_s": 0}


def test_a_plan_without_a_file_is_the_plan_of_the_job_that_init_writes(farpipe):
    assert farpipe("init", *WORDS).returncode == 0
    quick = ("--no-strategies", "--json")
    assert figures(farpipe("plan", *WORDS, *quick)) == figures(farpipe("plan", "job.toml", *quick))
    changed = ("--set", "training.global_batch=128", *quick)
    assert figures(farpipe("plan", *WORDS, *changed)) == figures(farpipe("plan", "job.toml", *changed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name its file, or give --model, --sites and --link"),
        (("--model", "tiny"), "--sites is missing"),
        (("job.toml", "--model", "tiny"), "change job.toml with --set"),
        (("job.toml", "--link", "2ms,1G"), "change job.toml with --set"),
    ],
)
def test_a_plan_is_of_a_file_or_of_words(farpipe, arguments, message):
    done = farpipe("plan", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_recipe_is_a_job_with_its_verdict(farpipe, tmp_path):
    done = farpipe("init", "--recipe", "two_sites")
    assert done.returncode == 0, done.stderr
    assert "llama-3-8b: use both sites" in done.stdout
    assert "farpipe plan job.toml" in (tmp_path / "job.toml").read_text()


def test_the_data_of_a_recipe_is_found_where_it_was_written(farpipe, tmp_path):
    (tmp_path / "new").mkdir()
    done = farpipe("init", "--recipe", "long_documents", "-o", "new/mine.toml")
    assert done.returncode == 0, done.stderr
    assert 'source = "new/long_documents.jsonl"' in (tmp_path / "new" / "mine.toml").read_text()


@pytest.mark.parametrize("name", ["megatron", "two_nodes"])
def test_the_next_command_on_a_folder_of_samples_runs(farpipe, name):
    done = farpipe("init", "--recipe", name, "-o", "mine")
    command = done.stdout.rpartition("Next: farpipe ")[2].split()
    assert farpipe(*command).returncode == 0
    again = farpipe("init", "--recipe", name, "-o", "mine")
    assert (again.returncode, "mine: exists already" in again.stderr) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("two_site",), "did you mean 'two_sites'"), (("two_sites", "--model", "tiny"), "--recipe has a model")],
)
def test_a_recipe_that_can_not_be_written_says_why(farpipe, arguments, message):
    done = farpipe("init", "--recipe", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
