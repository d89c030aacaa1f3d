"""From a log to the question "what would a second site bring?", by commands alone."""

import json

import pytest

from farpipe.core.spec import load_job
from interop.test_link_tests import PING
from interop.test_logs import megatron
from interop.test_megatron import SCRIPT
from job_files import EIGHT_LAYERS

TRAINING = "[training]\nsequence_length = 1024\nglobal_batch = 64\n"
LAYOUT = "[layout]\npipeline = 2\nlayers = [\n  4,\n  4,\n]\n"
SITE = '[[cluster.sites]]\nname = "zurich"\ndevice = "h100"\nnum_devices = 16\n'
OTHER = SITE.replace("zurich", "lugano")
LINK = '[[cluster.links]]\nbetween = ["zurich", "lugano"]\nlatency = "20 ms"\nbandwidth = "100 Gbit/s"\n'
ONE = EIGHT_LAYERS + TRAINING + LAYOUT + SITE


@pytest.fixture
def given(farpipe, tmp_path):
    """`given(job, *options)`: `farpipe import` of the job with a ping."""

    def run(job, *options, ping=True):
        (tmp_path / "job.toml").write_text(job)
        (tmp_path / "ping.txt").write_text(PING)
        return farpipe("import", "job.toml", *(["ping.txt"] if ping else []), *options)

    return run


def test_a_log_calibrates_a_job_that_gets_a_second_site_and_is_planned(farpipe, tmp_path):
    (tmp_path / "train.sh").write_text(SCRIPT.replace("--train-iters $STEPS", "").replace("--some-new-flag 7", ""))
    (tmp_path / "train.log").write_text("\n".join(megatron(step, 1000.0) for step in range(1, 14)))
    (tmp_path / "ping.txt").write_text(PING)
    for command in (
        "import train.sh --site h100 -o job.toml",
        "check job.toml --log train.log --tolerance 9 --calibrate fitted.toml",
        "check fitted.toml --log train.log",
        "import fitted.toml ping.txt --second-site 96 --link 400G -o two.toml",
        "plan two.toml --no-strategies",
    ):
        done = farpipe(*command.split())
        assert done.returncode == 0, (command, done.stderr)
    fitted, two = load_job(tmp_path / "fitted.toml"), load_job(tmp_path / "two.toml")
    own, second = two.cluster.sites
    assert (
        second.device
        == own.device
        == fitted.cluster.sites[0].device
        != load_job(tmp_path / "job.toml").cluster.sites[0].device
    )
    assert (second.num_devices, second.site_link) == (96, own.site_link)
    assert two.layout.pipeline is None
    assert two.cluster.link("second", "site").latency_s == pytest.approx(two.cluster.link("site", "second").latency_s)
    assert json.loads((tmp_path / "plan.json").read_text())["prediction"]["step_s"] > 0


@pytest.mark.parametrize(
    "job",
    [
        ONE,
        EIGHT_LAYERS + TRAINING + SITE + LAYOUT,
        ONE + "prices = {rent_usd_per_device_hour = 2.0}\n",
        ONE.replace("zurich", "second"),
        "layout = {pipeline = 2}\n" + EIGHT_LAYERS + TRAINING + SITE,
        "cluster.sites = [{name = 'zurich', device = 'h100', num_devices = 16}]\n" + EIGHT_LAYERS + TRAINING + LAYOUT,
        ONE + "devices_per_machine = 16\n",
        ONE.replace('device = "h100"', 'device = {preset = "h100", memory = "96 GB"}'),
    ],
    ids=["plain", "layout last", "prices", "its name", "inline layout", "inline sites", "machines", "own device"],
)
def test_a_second_site_is_like_the_first_however_the_job_is_written(given, tmp_path, job):
    done = given(job, "--second-site", "24", "-o", "two.toml")
    assert done.returncode == 0, done.stderr
    before, after = load_job(tmp_path / "job.toml"), load_job(tmp_path / "two.toml")
    first, second = after.cluster.sites
    assert first == before.cluster.sites[0]
    assert (second.device, second.num_devices) == (first.device, 24)
    assert after.layout == type(after.layout)()
    assert (after.model, after.training) == (before.model, before.training)
    assert second.prices.rent_usd_per_device_hour is None
    assert ("prices of site" in done.stderr) == ("prices" in job)


def test_measurements_take_the_place_of_a_job_s_link(given, tmp_path):
    assert given(ONE + OTHER + LINK, "-o", "measured.toml").returncode == 0
    before, after = load_job(tmp_path / "job.toml"), load_job(tmp_path / "measured.toml")
    assert after.cluster.links[0].latency_s < before.cluster.links[0].latency_s == 0.02
    assert after.cluster.sites == before.cluster.sites


@pytest.mark.parametrize(
    ("job", "options", "code", "words"),
    [
        (ONE + OTHER + LINK, ("--second-site", "8"), 3, "for a job of one site, and it has zurich, lugano"),
        (ONE, (), 2, "add --second-site N"),
        (ONE, ("--second-site", "8", "--link", "fast"), 2, "--link: expected a quantity with its unit such as"),
        (ONE, ("--second-site", "8", "--link", "5 ms,6 ms"), 2, "expected a latency and a bandwidth"),
        (ONE, ("--second-site", "8", "--site", "4xh100"), 2, "--site is for other frameworks' settings"),
    ],
)
def test_what_a_job_does_not_take_is_refused(given, job, options, code, words):
    done = given(job, *options, ping=False)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
