"""Plans of unlike sites that exchange after local steps."""

import pytest

from farpipe.core.spec import parse_job
from farpipe.engine.launch.runs import run_spec_of, site_settings
from farpipe.engine.outer.sites import run_at, share_of, sites_of
from farpipe.planning.explain.by_site import plans_by_site

JOB = """
[model]
num_layers = 8
hidden = 1024
num_heads = 8
ffn_hidden = 4096
vocab_size = 4096
[training]
sequence_length = 1024
global_batch = 32
precision = "bf16"
{training}
[[cluster.sites]]
name = "zurich"
device = "h100"
num_devices = 4
[[cluster.sites]]
name = "lugano"
device = "{device}"
num_devices = 4
[[cluster.links]]
between = ["zurich", "lugano"]
latency = "20 ms"
bandwidth = "1 Gbit/s"
[layout]
{layout}
"""
LOCAL = "local_steps = { every = 10 }"


def job(training=LOCAL, device="a100", layout=""):
    return parse_job(JOB.format(training=training, device=device, layout=layout), "job.toml")


def test_each_site_has_a_layout_and_a_share_of_its_own():
    found = plans_by_site(job())
    (fast, slow) = sorted(found.plans, key=lambda plan: plan.sites != ("zurich",) * len(plan.sites))
    assert {*fast.sites, *slow.sites} == {"zurich", "lugano"}
    assert fast.training.global_batch + slow.training.global_batch == 32
    assert fast.training.global_batch > slow.training.global_batch
    assert found.document.plan.prediction.step_s == max(fast.prediction.step_s, slow.prediction.step_s)
    assert "train by themselves and exchange after every 10 steps" in found.verdict


@pytest.mark.parametrize(
    "options",
    [{"training": ""}, {"device": "h100"}, {"layout": "pipeline = 4"}, {"layout": 'replicas = "across"'}],
    ids=["no local steps", "like sites", "one layout", "replicas"],
)
def test_where_one_plan_stands_for_all_sites_there_are_no_others(options):
    assert plans_by_site(job(**options)) is None


def test_the_run_of_it_has_what_every_site_does_and_the_links_between():
    found = plans_by_site(job())
    spec = run_spec_of(found.document.plan, device="cpu", **site_settings(found))
    sites = sites_of(spec)
    assert spec.link_between(*sites).latency_s == pytest.approx(0.02)
    assert [share_of(spec, site)[1] for site in sites] == [32, 32]
    assert share_of(spec, sites[1])[0] == run_at(spec, sites[0]).plan.training.global_batch
    assert run_at(spec, sites[0]).whole_batch == 32
