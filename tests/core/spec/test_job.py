"""A job as a whole: what fits together, and that it survives JSON and TOML."""

import json

import pytest
from hypothesis import given, settings

from farpipe.core.errors import InputError
from farpipe.core.spec import Job, SiteLink, Training, load_job, parse_job, preset_device, preset_model, preset_site
from farpipe.core.strict import parse_json, validate
from job_files import PLAIN, jobs

KEEP = settings(max_examples=60, deadline=None)


@KEEP
@given(jobs())
def test_a_job_survives_json(job):
    text = json.dumps(job.model_dump(mode="json"))
    assert Job.model_validate(parse_json(text, "plan")) == job
    assert Job.model_validate_json(job.model_dump_json()) == job


@KEEP
@given(jobs())
def test_a_job_made_in_python_survives_toml_exactly(job):
    text = job.to_toml()
    read = parse_job(text)
    assert read.model_copy(update={"text": ""}) == job
    assert read.to_toml() == text


def test_the_file_is_kept_word_for_word(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(PLAIN + "# a remark\n", encoding="utf-8")
    job = load_job(path)
    assert job.to_toml() == PLAIN + "# a remark\n"
    assert Job.model_validate(job.model_dump(mode="json")).to_toml() == job.to_toml()


def test_errors_in_a_plan_name_the_place_in_the_plan():
    data = parse_job(PLAIN).model_dump(mode="json")
    data["cluster"]["links"][1]["latency_s"] = -1
    with pytest.raises(
        InputError, match=r"^plan.json: job.cluster.links\[1\].latency_s: must be at least 0, found -1$"
    ):
        validate(Job, data, "plan.json", prefix="job")


def test_a_link_is_found_by_its_ends_and_a_missing_one_is_none():
    cluster = parse_job(PLAIN).cluster
    assert cluster.link("zurich", "lugano") == cluster.links[0]
    assert cluster.link("lugano", "zurich") == cluster.links[1]
    assert cluster.link("zurich", "zurich") is None
    assert cluster.links[0].name == "zurich>lugano"
    assert cluster.site("lugano").num_devices == 16
    assert cluster.num_devices == 24


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([("a", "c")], r"links\[0\]: there is no site 'c'"),
        ([("a", "b"), ("a", "b")], r"links\[1\]: the link from 'a' to 'b' is given twice"),
        ([("a", "b"), ("b", "a"), ("a", "a")], r"links\[2\]: 'a' is linked with itself"),
    ],
)
def test_a_cluster_made_in_python_is_checked_like_a_file(links, message):
    sites = [preset_site(name, "h100", 8).model_dump() for name in "ab"]
    made = [{"source": a, "target": b, "latency_s": 0.1, "bandwidth_bytes_per_s": 1e9} for a, b in links]
    with pytest.raises(InputError, match=message):
        validate(type(parse_job(PLAIN).cluster), {"sites": sites, "links": made}, "test")


def test_parts_from_the_catalogue_are_those_of_a_file():
    job = parse_job(PLAIN)
    assert preset_site("zurich", "H100", 8) == job.cluster.sites[0]
    assert preset_device("h100") == job.cluster.sites[0].device
    assert preset_model("Llama-3-8B") == job.model


def test_parts_are_frozen():
    link = SiteLink(source="a", target="b", latency_s=0.0, bandwidth_bytes_per_s=1.0)
    with pytest.raises(ValueError, match="frozen"):
        link.latency_s = 1.0


def test_tokens_and_bytes_of_training():
    training = Training(sequence_length=10, global_batch=4)
    assert training.tokens_per_step == 40
    sizes = {(p, z): training.model_copy(update={"precision": p, "zero": z}).num_bytes_per_param
             for p in ("bf16", "fp32") for z in (0, 1, 2, 3, "auto")}  # fmt: skip
    assert sizes == {
        ("bf16", 0): 16, ("bf16", 1): 4, ("bf16", 2): 2, ("bf16", 3): 2, ("bf16", "auto"): 2,
        ("fp32", 0): 16, ("fp32", 1): 8, ("fp32", 2): 4, ("fp32", 3): 4, ("fp32", "auto"): 4,
    }  # fmt: skip
