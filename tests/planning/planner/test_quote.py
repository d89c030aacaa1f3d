import pytest

from farpipe import planning
from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Pins, Prices
from farpipe.planning import Planner
from farpipe.planning.planner.quote import quote_of
from planning.planner.jobs import both_ways, device, job, site

REQUEST = job([site("a"), site("b")], both_ways("a", "b"), tensor=2)


def test_a_request_on_its_cluster_is_the_job():
    assert REQUEST.request.on(REQUEST.cluster) == REQUEST


def test_a_quote_of_a_plan_says_what_the_plan_predicts():
    plan = planning.plan(REQUEST)
    quote = quote_of(plan)
    assert (quote.step_s, quote.where, quote.exact) == (plan.prediction.step_s, plan.where, True)
    assert quote.num_devices == plan.layout.pipeline * plan.layout.data * plan.layout.tensor
    assert (
        0
        < quote.memory_bytes
        <= quote.memory_limit_bytes
        == device().memory_bytes - min(2.5 * 2**30, device().memory_bytes / 16)
    )
    assert {name: rate * quote.step_s for name, rate in quote.link_bytes_per_s.items()} == pytest.approx(
        {name: size for name, size in plan.prediction.link_bytes.items() if ":" not in name}
    )


def test_a_quote_for_what_is_left_uses_no_more():
    quote = Planner().quote(REQUEST.request, REQUEST.cluster, devices={"a": 2, "b": 0})
    assert quote.sites == ("a",)
    assert quote.devices == {"a": 2}


def test_a_link_without_rate_is_no_link():
    quote = Planner().quote(REQUEST.request, REQUEST.cluster, bytes_per_s={"a>b": 0.0})
    assert len(quote.sites) == 1


def test_nothing_left_is_infeasible():
    with pytest.raises(InfeasibleError, match="what is left"):
        Planner().quote(REQUEST.request, REQUEST.cluster, devices={"a": 0, "b": 0})


def test_an_estimate_is_near_what_is_simulated():
    planner = Planner()
    estimate = planner.quote(REQUEST.request, REQUEST.cluster)
    simulated = planner.quote(REQUEST.request, REQUEST.cluster, simulated=3)
    assert (estimate.exact, simulated.exact) == (False, True)
    assert estimate.step_s == pytest.approx(simulated.step_s, rel=0.25)
    assert simulated.step_s >= planning.plan(REQUEST).prediction.step_s * (1 - 1e-9)


def test_fewer_devices_are_never_faster_and_the_limit_is_kept():
    planner, request = Planner(), REQUEST.request
    quotes = [planner.quote(request, REQUEST.cluster, max_devices=number) for number in (2, 4, 8)]
    assert [quote.num_devices <= number for quote, number in zip(quotes, (2, 4, 8), strict=True)] == [True] * 3
    assert quotes[0].step_s >= quotes[1].step_s >= quotes[2].step_s


def test_what_sites_send_and_cost_is_told_of_estimates_too():
    prices = Prices(rent_usd_per_device_hour=2.0, electricity_usd_per_mwh=50.0, egress_usd_per_gb=0.02)
    sites = [place.model_copy(update={"prices": prices}) for place in REQUEST.cluster.sites]
    priced = REQUEST.model_copy(update={"cluster": REQUEST.cluster.model_copy(update={"sites": tuple(sites)})})
    request = priced.model_copy(update={"layout": Pins(sites=("a", "b"), replicas="inside", tensor=2)}).request
    quote = Planner().quote(request, priced.cluster)
    seconds = quote.num_devices * quote.step_s
    assert quote.money.rent_usd == pytest.approx(2.0 * seconds / 3600)
    sent = sum(quote.link_bytes_per_s.values()) * quote.step_s
    assert quote.money.egress_usd == pytest.approx(0.02 * sent / 1e9)
    assert "power at a" in quote.money.unpriced, "the device has no stated power"
