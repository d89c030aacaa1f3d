"""Outcome of a simulated fleet: completion times, waiting, use, money."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from farpipe.core.units import counted, format_change, format_percent, format_seconds
from farpipe.fleet.job import FleetJob, JobState, Spent
from farpipe.fleet.replacing import replace
from farpipe.planning.cost.money import KINDS, SECONDS_PER_HOUR


@dataclass
class JobRecord:
    """One job's life."""

    job: FleetJob
    states: list[tuple[float, str]] = field(default_factory=list)
    """(time, state it came into)."""
    final: JobState | None = None
    """State of the job when it ended."""
    finished_s: float | None = None
    """None: it did not finish."""
    refused: str = ""
    """Reason for which it was not taken at its submission; empty: it was."""

    unfinished: str = ""
    """Reason for which it neither finished nor ended by itself; empty: it did."""

    @property
    def jct_s(self) -> float | None:
        """Seconds from submission to the last step."""
        return None if self.finished_s is None else self.finished_s - self.job.submit_s

    @property
    def is_in_time(self) -> bool | None:
        """True if it finished by its deadline; None if it has none."""
        deadline_s = self.job.deadline_s
        return None if deadline_s is None else self.finished_s is not None and self.finished_s <= deadline_s

    def to_data(self, *, is_priced: bool = True) -> dict[str, Any]:
        """Return the record as JSON data; without prices it has no cost."""
        final = self.final
        return {
            "job": self.job.name,
            "tenant": self.job.tenant,
            "submitted_s": self.job.submit_s,
            "started_s": final.first_start_s if final else None,
            "finished_s": self.finished_s,
            "queued_s": final.queued_s if final else None,
            "num_preemptions": final.num_preemptions if final else 0,
            "num_moves": final.num_moves if final else 0,
            "cost_usd": (final.spent.total_usd if final else 0.0) if is_priced else None,
            "refused": self.refused or None,
            "unfinished": self.unfinished or None,
            "states": [{"time_s": time_s, "state": state} for time_s, state in self.states],
        }


@dataclass(frozen=True)
class Allocation:
    """Devices that a job holds from a moment on."""

    time_s: float
    job: str
    devices: Mapping[str, int]
    """Number by site; empty: none."""
    is_starting: bool
    rates: Mapping[str, float] = field(default_factory=dict)
    """Bytes/s that it has reserved, by directed link."""
    usd: float = 0.0
    """Rent, electricity and egress of the job up to then."""
    event: str = ""
    """Name of what happened, as in OUT.jsonl."""


@dataclass(frozen=True)
class FleetOutcome:
    """A simulated fleet from the first submission to the last end."""

    policy: str
    records: Sequence[JobRecord]
    begin_s: float
    end_s: float
    num_devices: Mapping[str, int]
    idle_energy_kwh: Mapping[str, float]
    """Energy of idle devices, by site."""
    idle_usd: Mapping[str, float]
    changes: Sequence[Allocation] = ()
    """Allocations of all jobs, by time."""
    link_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Rate of every directed link at the end."""
    num_refused: int = 0
    """Decisions of the policy that were not possible."""
    prices: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """(time, USD/MWh from then on) of electricity, by site."""
    unpriced: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Sites without a figure, by what it is of, as in `Scenario.unpriced`."""

    @property
    def is_priced(self) -> bool:
        """True if some price of some site is known."""
        return any(self.is_known(kind) for kind in KINDS)

    def is_known(self, kind: str) -> bool:
        """True if some site has a figure for `kind`."""
        return not set(self.num_devices) <= self.unpriced.get(kind, frozenset())

    @property
    def half_known(self) -> dict[str, list[str]]:
        """Sites without a figure that others have, by what it is of: sums are without these."""
        return {kind: sorted(sites) for kind, sites in self.unpriced.items() if sites and self.is_known(kind)}

    def known(self, kind: str, amounts: Mapping[str, float]) -> dict[str, float | None]:
        """The amounts by site; None where there is no figure to work them out with."""
        missing = self.unpriced.get(kind, frozenset())
        return {site: None if site in missing else amount for site, amount in amounts.items()}

    @property
    def spent(self) -> Spent:
        """Resources that all jobs have used."""
        total = Spent()
        for record in self.records:
            if record.final is not None:
                total = total.plus(record.final.spent)
        return total

    @property
    def jcts_s(self) -> list[float]:
        """Completion times of the jobs that finished, sorted."""
        return sorted(record.jct_s for record in self.records if record.jct_s is not None)

    @property
    def mean_jct_s(self) -> float | None:
        """Mean completion time of the jobs that finished; None where none did."""
        jcts = self.jcts_s
        return sum(jcts) / len(jcts) if jcts else None

    @property
    def queued_s(self) -> list[float]:
        """Total time in the queue of every job that was taken, sorted; up to the end of watching for one that waits."""
        return sorted(record.final.queued_s for record in self.records if record.final)

    @property
    def utilization(self) -> float:
        """Device-seconds that jobs held over those that there were."""
        held = sum(self.spent.device_s.values())
        return held / max(sum(self.num_devices.values()) * (self.end_s - self.begin_s), 1e-9)

    def tenants(self) -> dict[str, dict[str, Any]]:
        """Jobs, completion times, waits, device-hours and money by tenant."""
        found = {}
        for name in sorted({record.job.tenant for record in self.records}):
            mine = replace(self, records=[record for record in self.records if record.job.tenant == name])
            queued, spent = mine.queued_s, mine.spent
            found[name] = {
                "num_jobs": len(mine.records),
                "mean_jct_s": mine.mean_jct_s,
                "max_wait_s": queued[-1] if queued else None,
                "device_hours": sum(spent.device_s.values()) / SECONDS_PER_HOUR,
                "total_usd": spent.total_usd if self.is_priced else None,
            }
        return found

    def to_data(self) -> dict[str, Any]:
        """``farpipe fleet simulate --json``; figures of an empty fleet are null."""
        jcts, queued, spent = self.jcts_s, self.queued_s, self.spent
        return {
            "policy": self.policy,
            "num_jobs": len(self.records),
            "num_finished": len(jcts),
            "mean_jct_s": self.mean_jct_s,
            "median_jct_s": quantile(jcts, 0.5),
            "p95_jct_s": quantile(jcts, 0.95),
            "mean_wait_s": sum(queued) / len(queued) if queued else None,
            "p99_wait_s": quantile(queued, 0.99),
            "max_wait_s": queued[-1] if queued else None,
            "utilization": self.utilization,
            "span_s": self.end_s - self.begin_s,
            "money": {
                "rent": self.known("rent", spent.rent_usd),
                "electricity": self.known("electricity", spent.electricity_usd),
                "egress": self.known("egress", _by_source(spent.egress_usd)),
                "idle_electricity": self.known("electricity", self.idle_usd),
            },
            "total_usd": spent.total_usd if self.is_priced else None,
            "energy_kwh": {
                "jobs": self.known("energy", spent.energy_kwh),
                "idle": self.known("idle energy", self.idle_energy_kwh),
            },
            "carbon_g": self.known("carbon", spent.carbon_g),
            "unpriced": [f"{kind} at {site}" for kind, sites in self.unpriced.items() for site in sorted(sites)],
            "num_deadlines": len(in_time := [r.is_in_time for r in self.records if r.is_in_time is not None]),
            "num_deadlines_met": sum(in_time),
            "tenants": self.tenants(),
            "num_moves": sum(record.final.num_moves for record in self.records if record.final),
            "num_preemptions": sum(record.final.num_preemptions for record in self.records if record.final),
            "num_refused": self.num_refused,
            "jobs": [record.to_data(is_priced=self.is_priced) for record in self.records],
        }


ALIKE: Final = 0.01
"""Relative difference of two policies' figures up to which they tie."""


def most_finished(outcomes: Sequence[FleetOutcome]) -> list[FleetOutcome]:
    """Those that finished most jobs, the only ones whose means compare; empty where none finished one."""
    most = max(len(one.jcts_s) for one in outcomes)
    return [one for one in outcomes if len(one.jcts_s) == most > 0]


def verdict(outcomes: Sequence[FleetOutcome]) -> str:
    """Verdict on policies in one sentence: the best in completion times and money, and by how much; empty for one.

    Only those that finished most jobs are compared: who leaves jobs undone has short means.
    """
    if len(outcomes) < 2:
        return ""
    able = most_finished(outcomes)
    span_s = max(one.end_s - one.begin_s for one in outcomes)
    over = f"Over {counted(len(outcomes[0].records), 'job')} in {format_seconds(span_s)}"
    if not able:
        return f"{over} no policy finished one."
    most = len(able[0].jcts_s)
    if len(able) == 1:
        return (
            f"{over} {able[0].policy} alone finished {most}, the most: compare no means with those that finished fewer."
        )
    left = "" if len(able) == len(outcomes) else f", of the {len(able)} policies that finished {most}, the most"
    parts = [_winner("mean completion time", {one.policy: sum(one.jcts_s) / most for one in able}, format_seconds)]
    priced = [kind for kind in KINDS if outcomes[0].is_known(kind)]
    if priced and not {*KINDS} & {*outcomes[0].half_known}:
        spent = {one.policy: one.spent.total_usd for one in able}
        parts.append(_winner(f"money ({', '.join(priced)})", spent, lambda usd: f"${usd:,.2f}"))
    return f"{over}{left}: {'; '.join(parts)}."


def _winner(what: str, figures: Mapping[str, float], write: Callable[[float], str]) -> str:
    """The policy with the least figure, or those that tie with it, and how much more the next one has."""
    ranked = sorted(figures, key=lambda name: figures[name])
    best = figures[ranked[0]]
    tied = [name for name in ranked if figures[name] - best <= ALIKE * abs(best)]
    if len(tied) == len(ranked):
        return f"{what} is a tie ({write(best)}, all within {format_percent(ALIKE, 0)})"
    after = ranked[len(tied)]
    more = f"{format_change((figures[after] - best) / abs(best))}" if best else write(figures[after])
    who = f"{tied[0]} has the least" if len(tied) == 1 else f"{', '.join(tied)} tie for the least"
    return f"{who} {what}, {write(best)} (next: {after}, {more})"


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least of sorted `values` that is not below `share` of them; None if there are none."""
    if not values:
        return None
    return values[min(len(values), max(1, math.ceil(len(values) * share))) - 1]


def _by_source(egress_usd: Mapping[str, float]) -> dict[str, float]:
    """Egress of links as that of the sites that they leave."""
    found: dict[str, float] = {}
    for link, usd in egress_usd.items():
        site = link.partition(">")[0]
        found[site] = found.get(site, 0.0) + usd
    return found
