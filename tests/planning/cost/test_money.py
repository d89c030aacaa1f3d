"""Rent, electricity and egress of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_jobs import two_sites
from farpipe.core.spec import Cluster, Prices, parse_job
from farpipe.planning.cost.money import Tariff, egress_of, money, money_of_step, tariffs_of
from job_files import changed

WHOLE = Prices(
    rent_usd_per_device_hour=2.0,
    electricity_usd_per_mwh=50.0,
    pue=1.2,
    carbon_g_per_kwh=300.0,
    egress_usd_per_gb=0.02,
)
A, B = Tariff(WHOLE, 400.0), Tariff(WHOLE.model_copy(update={"electricity_usd_per_mwh": -30.0}), 400.0)


def an_hour(devices=None, link_bytes=None, **how):
    return money({"a": A, "b": B}, {"a>b": 0.02, "b>a": None}, devices or {"a": 8}, 3600.0, link_bytes or {}, **how)


def test_an_hour_of_eight_devices_is_what_one_computes_by_hand():
    found = an_hour(link_bytes={"a>b": 5e9})
    assert found.rent_usd == pytest.approx(16.0)
    assert found.energy_kwh == pytest.approx(8 * 0.4 * 1.2)
    assert found.electricity_usd == pytest.approx(8 * 0.4 * 1.2 * 0.05)
    assert found.carbon_g == pytest.approx(8 * 0.4 * 1.2 * 300)
    assert found.egress_usd == pytest.approx(0.1)
    assert found.total_usd == pytest.approx(16.0 + 0.192 + 0.1)
    assert found.unpriced == ()


def test_negative_electricity_pays():
    assert an_hour({"b": 8}).electricity_usd == pytest.approx(-8 * 0.4 * 1.2 * 0.03)


@pytest.mark.parametrize("kind", ["rent", "electricity", "egress"])
def test_each_kind_is_switched_alone(kind):
    found, whole = (an_hour(link_bytes={"a>b": 1e9}, **how) for how in ({"kinds": [kind]}, {}))
    for name in ("rent", "electricity", "egress"):
        assert getattr(found, f"{name}_usd") == (getattr(whole, f"{name}_usd") if name == kind else 0.0)
    assert (found.energy_kwh, found.carbon_g) == (whole.energy_kwh, whole.carbon_g)


def test_a_missing_price_is_named_and_a_site_that_is_not_used_is_not():
    bare = {"a": Tariff(Prices(), None), "b": Tariff(Prices(), 400.0), "c": Tariff(Prices(), None)}
    found = money(bare, {}, {"a": 1, "b": 1, "c": 0}, 3600.0, {"a>b": 1.0, "b>a": 0.0})
    assert found.total_usd == 0.0
    assert set(found.unpriced) == {
        *("power at a", "rent at a", "rent at b", "electricity at a", "electricity at b", "carbon at a", "carbon at b"),
        "egress a>b",
    }


@given(factor=st.floats(0.001, 1000), tokens=st.integers(1, 1 << 40), load=st.floats(0, 1))
def test_money_is_linear_in_time_and_traffic(factor, tokens, load):
    one = an_hour(link_bytes={"a>b": 1e9}, load=load)
    more = money({"a": A}, {"a>b": 0.02}, {"a": 8}, 3600.0 * factor, {"a>b": 1e9 * factor}, load=load)
    assert more.total_usd == pytest.approx(one.times(factor).total_usd)
    assert one.per_million_tokens(tokens).total_usd == pytest.approx(one.total_usd / tokens * 1e6)
    assert one.to_data()["total_usd"] == one.total_usd


def test_a_cluster_tells_its_tariffs_and_traffic_inside_a_site_is_free():
    sites = [s.model_copy(update={"prices": WHOLE}) for s in two_sites().sites]
    first, second = two_sites().links
    links = (first.model_copy(update={"egress_usd_per_gb": 0.5}), second)
    cluster = Cluster(sites=sites, links=links)
    assert egress_of(cluster) == {"a>b": 0.5, "b>a": 0.02}
    assert tariffs_of(cluster)["a"].power_w is None
    found = money_of_step(cluster, {"a": 8, "b": 8}, 3600.0, {"a>b": 1e9, "b>a": 1e9, "a:0>a:1": 1e15})
    assert found.egress_usd == pytest.approx(0.52)
    assert found.unpriced == ("power at a", "power at b")


def test_a_region_gives_prices_and_the_site_replaces_some_of_them():
    region = 'num_devices = 8\nregion = "aws:us-east-1"\nprices = { rent_usd_per_device_hour = 4.0, pue = 1.3 }'
    job = parse_job(changed(("num_devices = 8", region)))
    prices = job.cluster.sites[0].prices
    assert (prices.rent_usd_per_device_hour, prices.pue) == (4.0, 1.3)
    assert prices.egress_usd_per_gb == 0.02
    assert prices.electricity_usd_per_mwh is not None
    assert job.cluster.sites[1].prices == Prices()


def test_the_rent_of_a_region_is_that_of_the_site_s_device():
    job = parse_job(changed(("num_devices = 8", 'num_devices = 8\nregion = "gcp:europe-west4"')))
    assert job.cluster.sites[0].prices.rent_usd_per_device_hour == pytest.approx(2.91)
