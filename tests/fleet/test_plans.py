"""The plan of a placement against the quote on which the decision was made."""

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import JobSubmitted
from farpipe.fleet.job import FleetJob, Kind, timed_kind
from farpipe.fleet.plans import plan_of
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.state import first_state

SITES = ("amber", "birch")
CLUSTER = Cluster(
    sites=tuple(preset_site(name, "a100-80gb", 8) for name in SITES),
    links=tuple(
        SiteLink(source=a, target=b, latency_s=0.01, bandwidth_bytes_per_s=1e9) for a in SITES for b in SITES if a != b
    ),
)


def placed(kind, num_devices):
    state = first_state(CLUSTER, POLICIES["farpipe"], PlannerQuotes(CLUSTER))
    return state.handle(JobSubmitted(0.0, FleetJob("j", kind, 0.0, 1000, num_devices, num_devices)))[0]


def test_the_plan_has_the_quoted_layout_devices_and_step():
    state = placed(Kind("llama-3-8b", 4096, 256), 16)
    made, here = plan_of(state, CLUSTER, "j"), state.jobs["j"].placement
    assert here.sites == ("amber", "birch")
    assert (made.is_as_quoted, made.warning) == (True, "")
    assert abs(made.difference) < 0.05
    assert made.plan.candidate.layout.pipeline == here.layout.pipeline
    assert made.plan.candidate.devices == dict(here.devices)


def test_a_plan_whose_step_is_not_the_quoted_one_says_so():
    """Messages take most of this job's time between sites, which closed forms see as hidden."""
    state = placed(Kind("llama-3.2-3b", 2048, 256), 16)
    made = plan_of(state, CLUSTER, "j")
    step_s, quoted_s = made.plan.prediction.step_s, state.jobs["j"].placement.step_s
    assert made.difference == pytest.approx(quoted_s / step_s - 1)
    assert abs(made.difference) > 0.05
    assert "a step, quoted" in made.warning


def test_only_a_job_with_devices_and_a_model_has_a_plan():
    state = placed(timed_kind(8), 8)
    with pytest.raises(InputError, match="known by its duration alone"):
        plan_of(state, CLUSTER, "j")
    state, _ = state.handle(JobSubmitted(0.0, FleetJob("k", Kind("llama-3-8b", 4096, 64), 0.0, 10, 8, 8)))
    waits, _ = state.handle(JobSubmitted(0.0, FleetJob("l", Kind("llama-3-8b", 4096, 64), 0.0, 10, 8, 8)))
    with pytest.raises(InputError, match="'l' is queued: it has no devices"):
        plan_of(waits, CLUSTER, "l")
