"""One scenario, one trace, one policy: from files to an outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TextIO

from farpipe.errors import InputError
from farpipe.fleet.job import FleetJob
from farpipe.fleet.outcome import Outcome
from farpipe.fleet.policies import policy_of
from farpipe.fleet.policies.own import OwnPolicy
from farpipe.fleet.policies.protocol import Policy
from farpipe.fleet.quotes import PlannerQuotes, Quotes
from farpipe.fleet.scenario import Scenario
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import first_state
from farpipe.strict import nearest


def play(
    scenario: Scenario,
    jobs: Sequence[FleetJob],
    policy: str | Policy,
    *,
    quotes: Quotes | None = None,
    log: TextIO | None = None,
    tick_s: float = 900.0,
) -> Outcome:
    """The outcome of `jobs` in `scenario` under `policy`, a name or one's own.

    `log` gets a line of JSON for every change; every `tick_s` the policy may think again without an event. `quotes` can
    be shared between calls on the same cluster. The same arguments give the same outcome.
    """
    chosen = _configured(policy_of(policy), scenario) if isinstance(policy, str) else policy
    quotes = quotes or quotes_of(scenario)
    state = first_state(scenario.cluster, chosen, quotes, scenario.stops)
    simulator = Simulator(state, scenario.failures, scenario.idle_power_w, log)
    return simulator.run(jobs, scenario.events, tick_s=tick_s)


def quotes_of(scenario: Scenario) -> PlannerQuotes:
    """Speeds of jobs in `scenario`; to be shared by what is played in it."""
    return PlannerQuotes(scenario.cluster, hop_quotes=scenario.hop_quotes)


def _configured(policy: Policy, scenario: Scenario) -> Policy:
    """`policy` with the parameters and tenants of `scenario`; listed tenants want fairness unless it is set."""
    fairness = {"fairness": 1.0} if scenario.tenant_shares else {}
    chosen = with_parameters(policy, fairness | scenario.policy_parameters)
    if isinstance(chosen, OwnPolicy):
        return replace(chosen, tenant_shares=tuple(sorted(scenario.tenant_shares.items())))
    return chosen


def with_parameters(policy: Policy, parameters: Mapping[str, Any]) -> Policy:
    """`policy` with the parameters of [policy], which are those of `OwnPolicy`; others have none."""
    known = {field.name for field in fields(OwnPolicy)} - {"name", "tenant_shares"}
    for name in parameters:
        if name not in known:
            raise InputError(f"policy.{name}: unknown{nearest(name, known)}; known: {', '.join(sorted(known))}")
    return replace(policy, **parameters) if isinstance(policy, OwnPolicy) else policy
