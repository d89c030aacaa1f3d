"""Plans of unlike sites that exchange after local steps."""

import pytest

from farpipe.core.spec import LocalSteps
from farpipe.engine.launch.runs import run_spec_of, site_settings
from farpipe.engine.outer.sites import run_at, share_of, sites_of
from farpipe.planning.explain.by_site import plans_by_site
from planning.planner.jobs import TRAINING, both_ways, device, job, site

FAST, SLOW = device("fast", flops=624e12), device()
LOCAL = LocalSteps(every=10)


def asked(local=LOCAL, lugano=SLOW, **pins):
    training = TRAINING.model_copy(update={"global_batch": 32, "local_steps": local})
    links = both_ways("zurich", "lugano", 0.02, 1.0)
    return job([site("zurich", on=FAST), site("lugano", on=lugano)], links, training, **pins)


def test_each_site_has_a_layout_and_a_share_of_its_own():
    found = plans_by_site(asked())
    (fast, slow) = sorted(found.plans, key=lambda plan: plan.sites != ("zurich",) * len(plan.sites))
    assert {*fast.sites, *slow.sites} == {"zurich", "lugano"}
    assert fast.training.global_batch + slow.training.global_batch == 32
    assert fast.training.global_batch > slow.training.global_batch
    assert found.document.plan.prediction.step_s == max(fast.prediction.step_s, slow.prediction.step_s)
    assert "train by themselves and exchange after every 10 steps" in found.verdict


@pytest.mark.parametrize(
    "options",
    [{"local": None}, {"lugano": FAST}, {"pipeline": 4}, {"replicas": "across"}],
    ids=["no local steps", "like sites", "one layout", "replicas"],
)
def test_where_one_plan_stands_for_all_sites_there_are_no_others(options):
    assert plans_by_site(asked(**options)) is None


def test_the_run_of_it_has_what_every_site_does_and_the_links_between():
    found = plans_by_site(asked())
    spec = run_spec_of(found.document.plan, device="cpu", **site_settings(found))
    sites = sites_of(spec)
    assert spec.link_between(*sites).latency_s == pytest.approx(0.02)
    assert [share_of(spec, site)[1] for site in sites] == [32, 32]
    assert share_of(spec, sites[1])[0] == run_at(spec, sites[0]).plan.training.global_batch
    assert run_at(spec, sites[0]).whole_batch == 32
