import csv
import json
import os
from pathlib import Path

import pytest

from job_files import EIGHT_LAYERS

GOLDEN = Path(__file__).parent / "golden" / "pareto.txt"
JOB = EIGHT_LAYERS + "[training]\nsequence_length = 1024\nglobal_batch = 16\n"
SITE = """
[[cluster.sites]]
name = "{name}"
device = "a100-80gb"
num_devices = 8
{prices}
"""
PRICES = "prices = {{ rent_usd_per_device_hour = {rent}, electricity_usd_per_mwh = 40, egress_usd_per_gb = 0.02 }}"
LINK = '\n[[cluster.links]]\nbetween = ["dear", "cheap"]\nlatency = "1 ms"\nbandwidth = "400 Gbit/s"\n'


DEAR, CHEAP = PRICES.format(rent=4.0), PRICES.format(rent=1.0)


def job_text(dear=DEAR, cheap=CHEAP):
    return JOB + SITE.format(name="dear", prices=dear) + SITE.format(name="cheap", prices=cheap) + LINK


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(job_text())
    return path


def test_csv_has_every_choice_with_its_money(farpipe, job_file, tmp_path):
    options = json.loads(farpipe("pareto", job_file, "--json", "--csv", "front.csv").stdout)["options"]
    rows = list(csv.DictReader((tmp_path / "front.csv").read_text().splitlines()))
    assert [float(row["step_s"]) for row in rows] == [one["step_s"] for one in options]
    assert [float(row["total_usd"]) for row in rows] == [one["per_million_tokens"]["total_usd"] for one in options]


def test_the_front_is_shown_as_a_table(farpipe, job_file):
    text = farpipe("pareto", job_file).stdout
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_json_has_every_choice_and_says_which_no_other_beats(farpipe, job_file):
    data = json.loads(farpipe("pareto", job_file, "--json").stdout)
    assert (data["format"], data["objectives"]) == ("farpipe/pareto/1", ["time", "money"])
    figures = [(row["step_s"], row["per_million_tokens"]["total_usd"], row["on_front"]) for row in data["options"]]
    front = [(step_s, usd) for step_s, usd, on_front in figures if on_front]
    assert 1 < len(front) < len(figures)
    for step_s, usd, on_front in figures:
        beaten = any(a <= step_s and b <= usd and (a, b) != (step_s, usd) for a, b in front)
        assert not (on_front and beaten)
        assert on_front or any(a <= step_s and b <= usd for a, b in front)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--objective", "time,mony"), 2, "there is no 'mony'; did you mean 'money'?"),
        (("--objective", "time"), 2, "expected two or more different ones"),
    ],
)
def test_what_is_wrong_with_an_option_is_said(farpipe, job_file, options, code, message):
    run = farpipe("pareto", job_file, *options)
    assert run.returncode == code
    assert message in run.stderr


def test_sites_without_a_price_are_no_bargain(farpipe, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(job_text(cheap=""))
    data = json.loads(farpipe("pareto", path, "--json").stdout)
    assert {tuple(row["sites"]) for row in data["options"]} == {("dear",)}
    path.write_text(job_text("", ""))
    run = farpipe("pareto", path)
    assert run.returncode == 4
    assert "there is no figure for" in run.stderr
    assert "give the sites of the job `prices`" in run.stderr


RENTED = "prices = {{ rent_usd_per_device_hour = {rent}, egress_usd_per_gb = 0.02 }}"


def test_who_rents_devices_needs_no_price_of_electricity(farpipe, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(job_text(RENTED.format(rent=4.0), RENTED.format(rent=1.0)))
    front = farpipe("pareto", path)
    assert front.returncode == 0, front.stderr
    told = " ".join(front.stdout.split())
    assert "Counted as nothing, for no figure was given: electricity at cheap, electricity at dear." in told
    plan = farpipe("plan", path, "--objective", "money", "--no-strategies")
    assert ": use cheap." in plan.stdout, plan.stderr
    path.write_text(job_text(cheap="", dear="prices = { rent_usd_per_device_hour = 2 }"))
    assert farpipe("pareto", path).returncode == 0


def test_of_very_many_sites_those_that_compute_most_are_looked_at_and_that_is_said(farpipe, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB + "".join(SITE.format(name=f"s{index}", prices=DEAR) for index in range(40)))
    text = " ".join(farpipe("pareto", path).stdout.split())
    assert "Of 40 sites the 16 that compute most were looked at" in text
