"""Copies of checkpoints: sent and billed while a job runs, gone on from when the site of the newest one is lost."""

import pytest

from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.events import (
    CheckpointStored,
    Happened,
    JobStarted,
    JobSubmitted,
    LinkChanged,
    Preempt,
    SiteBack,
    SiteLost,
    Start,
    Tick,
)
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import first_state
from farpipe.testing.policies import SimpleQuotes
from refusals import refusal

KIND = Kind("llama-3-8b", 512, 64)
STEP_S = SimpleQuotes().placement(KIND, (("a", 8),), {}).step_s
STATE_BYTES = SimpleQuotes().state_bytes(KIND)
HOURLY = StopCosts(copy_every_s=3600.0)
JOB = FleetJob("j", KIND, 0.0, 100_000, 8, 8)


def fleet(stops=HOURLY, egress=(("a>b", 0.05), ("a>c", 0.02))):
    """Three sites with room for one job each; `a` comes first."""
    sites = tuple(preset_site(name, "a100-80gb", 8) for name in "abc")
    price = dict(egress)
    links = tuple(
        SiteLink(source=x, target=y, latency_s=0.01, bandwidth_bytes_per_s=1e9, egress_usd_per_gb=price.get(f"{x}>{y}"))
        for x in "abc"
        for y in "abc"
        if x != y
    )
    return first_state(Cluster(sites=sites, links=links), POLICIES["fcfs"], SimpleQuotes(), stops)


def running(stops=HOURLY):
    """The job runs at `a` from 120 s on."""
    state, (start,) = fleet(stops).handle(JobSubmitted(0.0, JOB))
    assert start.placement.sites == ("a",)
    return state.handle(JobStarted(120.0, "j", 1))[0]


def test_copies_go_to_the_site_with_the_cheapest_egress_and_are_billed():
    state = running()
    assert state.jobs["j"].placement.copied_bytes_per_s == {"a>c": STATE_BYTES / 3600}
    assert state.space().rates["a>c"] == 1e9 - STATE_BYTES / 3600
    state, commands = state.handle(CheckpointStored(3720.0, "j", 1, "c", 0.0))
    assert commands == []
    spent = state.jobs["j"].spent
    assert spent.sent_bytes == {"a>c": pytest.approx(STATE_BYTES)}
    assert spent.egress_usd == {"a>c": pytest.approx(0.02 * STATE_BYTES / 1e9)}


def test_without_copies_nothing_is_sent():
    assert running(StopCosts()).jobs["j"].placement.copied_bytes_per_s == {}


def test_no_copies_where_no_link_has_the_room():
    assert running(StopCosts(copy_every_s=1.0)).jobs["j"].placement.copied_bytes_per_s == {}


def test_a_lost_site_takes_its_checkpoints_along_and_the_job_goes_on_from_a_copy():
    state, _ = running().handle(
        CheckpointStored(3720.0, "j", 1, "c", 40.0), CheckpointStored(6000.0, "j", 1, "a", 90.0)
    )
    state, (stop, start) = state.handle(SiteLost(7000.0, "a"))
    assert (type(stop), stop.why, type(start)) == (Preempt, "a is lost", Start)
    assert state.done == (
        Happened("j", "preempt", "queued", why="a is lost"),
        Happened("j", "start", "starting", start.placement),
    )
    job = state.jobs["j"]
    assert (job.num_done, job.num_stored, job.stored_at) == (40.0, 40.0, "c")
    assert job.copies == {}, "steps from 40 to 90 are done again, so their checkpoint at a is void"
    assert start.placement.moved_bytes == {"c>b": STATE_BYTES}, "b comes before c, and has to be sent it"


def test_without_a_copy_it_waits_for_the_site():
    state, commands = running().handle(CheckpointStored(6100.0, "j", 1, "a", 70.0), SiteLost(7000.0, "a"))
    assert [type(command) for command in commands] == [Preempt]
    state, (start,) = state.handle(SiteBack(9000.0, "a"))
    assert (type(start), state.jobs["j"].num_done) == (Start, 70.0)


def test_a_site_that_is_back_has_its_newer_checkpoint_still_if_nothing_went_on_without_it():
    state, _ = running().handle(CheckpointStored(3720.0, "j", 1, "c", 40.0))
    stored = CheckpointStored(6100.0, "j", 1, "a", 70.0)
    state, _ = state.handle(stored, SiteLost(7000.0, "b"), SiteLost(7000.0, "c"), SiteLost(7000.0, "a"))
    assert (state.jobs["j"].phase, state.jobs["j"].stored_at) == ("queued", "a")
    state, (start,) = state.handle(SiteBack(7100.0, "a"))
    assert (start.placement.sites, state.jobs["j"].num_done) == (("a",), 70.0)
    assert state.jobs["j"].copies == {"c": 40.0}


def test_the_loss_of_the_site_with_the_copies_stops_nobody():
    state, _ = running().handle(CheckpointStored(3720.0, "j", 1, "c", 40.0))
    state, commands = state.handle(SiteLost(4000.0, "c"))
    assert commands == []
    assert state.jobs["j"].placement.copied_bytes_per_s == {"a>b": STATE_BYTES / 3600}
    assert state.done == (Happened("j", "copy", "running", state.jobs["j"].placement),)
    state, commands = state.handle(LinkChanged(4100.0, "a>b", 1e6))
    assert commands == []
    assert state.jobs["j"].placement.copied_bytes_per_s == {}, "too thin"


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (CheckpointStored(130.0, "j", 1, "d", 0.0), "there is no site 'd'"),
        (CheckpointStored(130.0, "j", 1, "c", 1e5 + 1), "job 'j': num_steps: expected from 0 to "),
        (CheckpointStored(130.0, "j", 2, "c", 0.0), "attempt 2 of job 'j' has not begun"),
    ],
)
def test_copies_that_can_not_be(event, says):
    assert says in refusal(running(), event)


def test_a_copy_of_an_attempt_that_is_over_changes_nothing():
    lost, _ = running().handle(SiteLost(200.0, "a"))
    late, commands = lost.handle(CheckpointStored(300.0, "j", 1, "c", 1.0))
    assert (commands, late.jobs["j"].copies) == ([], {})


def test_simulated_outage_costs_the_work_since_the_last_whole_copy():
    """A copy that is begun at t is whole an hour later: the loss is the work since its begin, never a wait for `a`."""
    jobs = [FleetJob("j", KIND, 0.0, 5000, 8, 8)]
    outage = [SiteLost(9000.0, "a"), SiteBack(1e6, "a")]
    seen = []
    simulator = Simulator(fleet(), after=lambda state, event: seen.append((state.now_s, event, state)))
    outcome = simulator.run(jobs, outage)
    copies = [
        (event.time_s, event.site, event.num_steps) for _, event, _ in seen if isinstance(event, CheckpointStored)
    ]
    assert copies[:2] == [(3720.0, "c", 0.0), (7320.0, "c", pytest.approx(3600.0 / STEP_S))]
    lost = next(state for _, event, state in seen if isinstance(event, SiteLost))
    assert lost.jobs["j"].num_done == pytest.approx(3600.0 / STEP_S)
    assert outcome.records[0].finished_s < 1e6
    waited = Simulator(fleet(StopCosts())).run(jobs, outage).records[0]
    assert waited.finished_s > 1e6


def test_a_tick_leaves_copies_as_they_are():
    state = running()
    assert state.handle(Tick(500.0))[0].jobs["j"].placement == state.jobs["j"].placement
