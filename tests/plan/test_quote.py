import pytest

from farpipe.errors import InfeasibleError
from farpipe.plan import Planner, make_plan
from farpipe.plan.quote import quote_of
from plan.jobs import both_ways, device, job, site

REQUEST = job([site("a"), site("b")], both_ways("a", "b"), tensor=2)


def test_a_request_on_its_cluster_is_the_job():
    assert REQUEST.request.on(REQUEST.cluster) == REQUEST


def test_a_quote_of_a_plan_says_what_the_plan_predicts():
    plan = make_plan(REQUEST)
    quote = quote_of(plan)
    assert (quote.step_s, quote.where, quote.exact) == (plan.prediction.step_s, plan.where, True)
    assert quote.num_devices == plan.layout.pipeline * plan.layout.data * plan.layout.tensor
    assert 0 < quote.memory_bytes <= quote.memory_limit_bytes == device().memory_bytes * 15 / 16
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
    with pytest.raises(InfeasibleError, match="no device is left"):
        Planner().quote(REQUEST.request, REQUEST.cluster, devices={"a": 0, "b": 0})
