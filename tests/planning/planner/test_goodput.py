"""Failures as events of a run: what they cost each strategy, to the second, and what plans tell of it."""

from itertools import pairwise

import pytest

from farpipe.core.spec import load_job
from farpipe.core.spec.load import parse_job
from farpipe.planning.explain.goodput import (
    RESTART_S,
    SURVIVE_S,
    Failure,
    UnderFailures,
    failures_of,
    on_failures,
    play,
    under_failures,
    with_goodput,
)
from farpipe.planning.planner.plan import Strategy
from farpipe.report.plan_tables import strategy_table

JOB = """
[model]
num_layers = 8
hidden = 1024
num_heads = 16
ffn_hidden = 4096
vocab_size = 32000
[training]
sequence_length = 1024
global_batch = 16
checkpoint_every_steps = 100
checkpoint_every_minutes = 0
mirror = {mirror}
[[cluster.sites]]
name = "a"
device = "a100-80gb"
num_devices = 8
{mtbf}
[[cluster.sites]]
name = "b"
device = "a100-80gb"
num_devices = 8
{mtbf}
[[cluster.links]]
between = ["a", "b"]
latency = "5 ms"
bandwidth = "10 Gbit/s"
"""


def job(mtbf='mtbf = "1 h"', mirror="false"):
    return parse_job(JOB.format(mtbf=mtbf, mirror=mirror), "job")


def strategy(kind, sites, step_s=1.0, **more):
    words = {"what": "", "num_devices": 8, "inter_site_bytes": 0.0, "usd_per_million_tokens": 0.0}
    where = (" > " if kind == "pipeline" else " + ").join(sites)
    return Strategy(kind=kind, where=where, step_s=step_s, tokens_per_s=1000 / step_s, **words | more)


STRATEGIES = [
    strategy("local steps", ("a", "b"), 0.9, training="local steps between exchanges"),
    strategy("replicas", ("a", "b"), 1.0),
    strategy("pipeline", ("a", "b"), 1.1),
    strategy("one site", ("a",), 2.0),
    strategy("one site", ("b",), 2.0),
]


def under(recovery, speed, num_sites=2, every=10.0, **more):
    return UnderFailures(1.0, recovery, speed, every, num_sites=num_sites, **more)


def stopping(away):
    return 0.0 if away else 1.0


def halved(away):
    return 1.0 - len(away) / 2


def test_without_a_failure_nothing_is_lost():
    assert play(under("restart", stopping), [], 1000.0) == (1.0, 0.0, 0)


def test_a_restart_undoes_the_steps_since_the_checkpoint_and_waits_for_the_site():
    found = play(under("restart", stopping), [Failure(105.0, "a", 125.0)], 1000.0)
    assert found.steps_lost == 5.0
    assert found.share == pytest.approx((100 + 1000 - 125 - RESTART_S) / 1000)


def test_a_site_that_dies_with_its_disk_takes_all_steps_with_it_unless_they_are_mirrored():
    death = [Failure(105.0, "a", 125.0, is_death=True)]
    assert play(under("restart", stopping), death, 1000.0).steps_lost == 105.0
    mirrored = play(under("mirror", halved, mirror_steps=7.0), death, 1000.0)
    assert mirrored.steps_lost == 15.0, "the checkpoint of step 100 was still on its way"
    back_s = 125.0 + RESTART_S
    assert mirrored.share == pytest.approx((90 + 1000 - back_s) / 1000), "it was away for less than a restart takes"


def test_replicas_lose_no_step_and_go_on_at_half_the_speed():
    found = play(under("survivors", halved), [Failure(100.0, "a", 200.0)], 1000.0)
    assert found.steps_lost == 0.0
    assert found.share == pytest.approx((100 + (100 - SURVIVE_S - 1.0) / 2 + 800) / 1000)


def test_when_all_replicas_are_away_the_last_checkpoint_is_what_is_left():
    failures = [Failure(100.0, "a", 200.0), Failure(150.0, "b", 250.0)]
    found = play(under("survivors", halved), failures, 1000.0)
    assert found.steps_lost == pytest.approx((100 + 48 / 2 - 120) / 2)


def test_local_steps_lose_a_sites_share_since_the_last_exchange():
    found = play(under("local steps", halved, every=100.0), [Failure(150.0, "a", 160.0)], 1000.0)
    assert found.steps_lost == 25.0
    assert found.share == pytest.approx((125 + 5 + 840) / 1000)


def test_failures_come_with_the_mean_time_that_a_site_states():
    sites = job().cluster.sites
    found = failures_of(sites, 4000 * 3600.0)
    assert len(found) == pytest.approx(2 * 4000 * 3600 / 3720, rel=0.05)
    assert found == failures_of(sites, 4000 * 3600.0), "the same for every plan"
    assert all(one.back_s - one.at_s == pytest.approx(120.0) for one in found)
    assert failures_of(job(mtbf="").cluster.sites, 1e9) == []


def test_at_one_failure_an_hour_a_site_exact_replicas_keep_95_percent():
    found = {one.kind: one for one in with_goodput(job(), STRATEGIES, 100)}
    assert found["replicas"].goodput >= 0.95
    assert found["pipeline"].goodput < found["one site"].goodput < found["replicas"].goodput
    assert found["local steps"].goodput >= 0.95
    assert {one.recovery for one in found.values()} == {"survivors", "restart", "local steps"}
    assert found["pipeline"].steps_lost_per_failure == pytest.approx(50, rel=0.15), "half a checkpoint's interval"


def test_a_mirror_keeps_more_of_a_pipeline_when_a_site_is_away_for_long():
    away = 'mtbf = "4 h"\nmttr = "1 h"'
    restarted, mirrored = (
        next(one for one in with_goodput(job(away, mirror), STRATEGIES, 100) if one.kind == "pipeline")
        for mirror in ("false", "true")
    )
    assert (restarted.recovery, mirrored.recovery) == ("restart", "mirror")
    assert mirrored.goodput > restarted.goodput + 0.1
    assert mirrored.steps_lost_per_failure > restarted.steps_lost_per_failure, "a checkpoint takes a while to travel"


def test_fewer_failures_cost_less():
    shares = []
    for hours in (1, 4, 24, 240):
        found = with_goodput(job(f'mtbf = "{hours} h"'), STRATEGIES, 100)
        shares.append([one.goodput for one in found])
    assert all(one <= other for rows in pairwise(shares) for one, other in zip(*rows, strict=True))
    assert min(shares[-1]) > 0.98


def test_a_job_that_states_no_failures_has_no_goodput():
    assert with_goodput(job(mtbf=""), STRATEGIES, 100) == STRATEGIES
    assert "goodput" not in STRATEGIES[0].model_dump()
    assert strategy_table(STRATEGIES).columns[-1] == "training"


def test_the_table_and_the_json_name_what_a_failure_costs():
    found = with_goodput(job(), STRATEGIES, 100)
    table = strategy_table(found)
    assert table.columns[-3:] == ("after a failure", "steps lost", "goodput")
    assert table.rows[1][-3] == "survivors"
    assert table.rows[1][-1].endswith(" %")
    data = found[2].model_dump(mode="json")
    assert {"recovery", "goodput", "steps_lost_per_failure"} <= set(data)
    assert Strategy.model_validate(data).goodput == found[2].goodput


def test_plans_tell_what_a_mirror_would_bring_and_what_trains_most():
    away = job('mtbf = "4 h"\nmttr = "1 h"')
    found = with_goodput(away, STRATEGIES, 100)
    told = list(on_failures(away, found, "a > b"))
    assert "replicas at a + b trains most" in told[0]
    assert "training.mirror = true" in told[1]
    assert list(on_failures(job(mtbf=""), STRATEGIES, "a > b")) == []


def test_no_mirror_helps_one_site():
    run = under_failures(job(mirror="true"), STRATEGIES[3], STRATEGIES, mirrors=True)
    assert run.recovery == "restart"
    assert run.speed(frozenset({"a"})) == 0.0


def test_the_keys_survive_the_way_to_a_file_and_back(tmp_path):
    one = job('mtbf = "90 min"\nmttr = "45 s"')
    path = tmp_path / "job.toml"
    path.write_text(one.model_copy(update={"text": ""}).to_toml())
    again = load_job(path)
    assert [(site.mtbf_s, site.mttr_s) for site in again.cluster.sites] == [(5400.0, 45.0)] * 2
