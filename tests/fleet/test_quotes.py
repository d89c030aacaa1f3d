"""Quotes inside a site against the planner asked for just those devices."""

import pytest

from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Cluster, preset_site
from farpipe.fleet.job import Kind
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.requests import request_of
from farpipe.planning.planner.quotes import Planner

SMALL, LARGE = Kind("llama-3.2-1b", 2048, 256), Kind("qwen2.5-32b", 4096, 512)


def plain(site, kind, num_devices):
    """Seconds of a step as a planner of its own says for a site of so many devices."""
    machine = min(site.devices_per_machine, num_devices)
    alone = site.model_copy(
        update={"num_devices": num_devices, "devices_per_machine": 1 if num_devices % machine else machine}
    )
    try:
        return Planner().quote(request_of(kind), Cluster.model_construct(sites=(alone,), links=())).step_s
    except InfeasibleError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SMALL, LARGE], ids=lambda kind: kind.model)
def test_quotes_of_all_sizes_are_those_of_a_planner_for_each(kind):
    """One of them asks about parts of one large site, so that sizes share what the planner knows."""
    sites = tuple(preset_site(name, "a100-80gb", 64) for name in ("one", "other"))
    quotes = PlannerQuotes(Cluster(sites=sites))
    for num_devices in (1, 2, 3, 4, 6, 8, 12, 24, 40, 64, 96, 128, 1024, 1536):
        found = quotes.placement(kind, (("other", num_devices),), {})
        expected = plain(sites[0], kind, num_devices)
        assert (found and found.step_s) == (expected and pytest.approx(expected, rel=1e-12)), num_devices
