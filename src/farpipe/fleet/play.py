"""Simulation of a scenario and a trace under a policy."""

from collections.abc import Callable, Sequence
from typing import Final, TextIO

from farpipe.core.arguments import expect_kind, expect_list
from farpipe.core.errors import InputError
from farpipe.fleet.events import Event
from farpipe.fleet.job import FleetJob
from farpipe.fleet.outcome import FleetOutcome
from farpipe.fleet.policies import policy_of
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.quotes import PlannerQuotes, Quotes
from farpipe.fleet.replacing import replace
from farpipe.fleet.scenario import Scenario
from farpipe.fleet.series import MAX_GAP_S
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import FleetState, first_state

SECONDS_PER_DAY: Final = 86400.0


def play(
    scenario: Scenario,
    jobs: Sequence[FleetJob],
    policy: str | Policy,
    *,
    quotes: Quotes | None = None,
    log: TextIO | None = None,
    tick_s: float = 900.0,
    after: Callable[[FleetState, Event], None] = lambda state, event: None,
) -> FleetOutcome:
    """The outcome of `jobs` in `scenario` under `policy`, a name or one's own.

    `log` gets a line of JSON for every change; every `tick_s` the policy may think again without an event. `quotes` can
    be shared between calls on the same cluster; `after` is called with every state. The same arguments give the same
    outcome.
    """
    expect_kind("play: scenario", scenario, Scenario, "a Scenario, such as farpipe.fleet.load_scenario(FILE) reads")
    expect_list("play: jobs", jobs, FleetJob, "a FleetJob; farpipe.fleet.read_jobs(FILE) reads them")
    _expect_series(scenario, jobs)
    chosen = configured(policy_of(policy), scenario) if isinstance(policy, str) else policy
    quotes = quotes or quotes_of(scenario)
    state = first_state(scenario.cluster, chosen, quotes, scenario.stops)
    simulator = Simulator(state, scenario.failures, scenario.idle_power_w, log, after)
    return replace(simulator.run(jobs, scenario.events, tick_s=tick_s), unpriced=scenario.unpriced)


def quotes_of(scenario: Scenario) -> PlannerQuotes:
    """Speeds of jobs in `scenario`; to be shared by what is played in it."""
    return PlannerQuotes(scenario.cluster, hop_quotes=scenario.hop_quotes)


def configured(policy: Policy, scenario: Scenario) -> Policy:
    """`policy` with the parameters and tenants of `scenario`; listed tenants want fairness unless it is set."""
    if not isinstance(policy, FarpipePolicy):
        return policy
    shares = tuple(sorted(scenario.tenant_shares.items()))
    return replace(policy, **({"fairness": 1.0} if shares else {}) | scenario.policy_parameters, tenant_shares=shares)


def _expect_series(scenario: Scenario, jobs: Sequence[FleetJob]) -> None:
    last_s = max((job.submit_s for job in jobs), default=0.0)
    for name, end_s in scenario.series_end_s.items():
        if last_s > end_s + MAX_GAP_S:
            days = last_s / SECONDS_PER_DAY, end_s / SECONDS_PER_DAY
            raise InputError(f"{name}: ends after {days[1]:.1f} days, the last job comes after {days[0]:.1f}")
