"""Cost of wrong and late inputs and of faults: FARPIPE_DATA=folder python -m benchmarks.fleet.fleet_faults [--starts N]

The case of fleet_comparison.py at load 0.9, `bace`, `farpipe` for JCT and electricity and by default. Estimates: the
policy believes that every job has 0.5 to 2 times its steps (drawn per job, log-uniform). Late prices: it sees those of
so many minutes ago, while the bill follows the present ones. A site is lost for an hour every day; 60 jobs come at
once; every link is at a tenth for the first half. Changes are in percent against the same policy without the fault.

Late rates of links (`--links`): the case of fleet_wide.py with links at 2 times what was measured; those among three of
the regions have between half and all of that, drawn anew every half hour; the policy sees the rates of a while ago.

Copies of checkpoints (`--copies`): in the middle of the jobs one site is lost for three days, each in turn; the jobs
that ran there wait for it, or go on from copies at other sites, which all jobs send all the time, each over so many
hours.
"""

import argparse
import json
import random
import statistics
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.fleet.fleet_case import REGIONS, Row, StepTimes, jobs_of, percent_change, philly, resumed, scenario
from benchmarks.fleet.fleet_wide import row, trace
from farpipe.fleet.events import LinkChanged, SiteBack, SiteLost
from farpipe.fleet.job import FleetJob, JobState
from farpipe.fleet.outcome import FleetOutcome
from farpipe.fleet.play import play
from farpipe.fleet.policies import policy_of
from farpipe.fleet.policies.farpipe_policy import FarpipePolicy
from farpipe.fleet.policies.protocol import Decision, Policy, View
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.scenario import Scenario
from farpipe.optical.confidence import mean_interval

DAY_S, HOUR_S = 86400.0, 3600.0


@dataclass(frozen=True)
class Misjudging:
    """A policy that believes every job to have another number of steps."""

    policy: Policy
    spread: float = 2.0

    @property
    def name(self) -> str:
        """That of the policy."""
        return self.policy.name

    def decide(self, view: View) -> Iterable[Decision]:
        """As in `Policy`."""
        jobs = {name: self._seen(state) for name, state in view.state.jobs.items()}
        return self.policy.decide(View(replace(view.state, jobs=jobs)))

    def _seen(self, state: JobState) -> JobState:
        share = zlib.crc32(state.name.encode()) / 2**32
        steps = state.job.num_steps * self.spread ** (2 * share - 1)
        least = int(state.num_done) + 1  # what is done is known
        return replace(state, job=replace(state.job, num_steps=max(least, round(steps))))


@dataclass(frozen=True)
class LateLinks:
    """A policy that sees the links' rates as they were some minutes ago."""

    policy: Policy
    minutes: float
    history: Mapping[str, Sequence[tuple[float, float]]]
    """(time, rate) of every link, by time."""

    @property
    def name(self) -> str:
        """That of the policy."""
        return self.policy.name

    def decide(self, view: View) -> Iterable[Decision]:
        """As in `Policy`."""
        seen_s = view.now_s - 60 * self.minutes
        return self.policy.decide(
            View(replace(view.state, rates={link: self._at(link, seen_s) for link in view.rates}))
        )

    def _at(self, link: str, time_s: float) -> float:
        rows = self.history[link]
        return rows[max(0, bisect_right(rows, (time_s, float("inf"))) - 1)][1]


Allocation = Callable[[Scenario, list[FleetJob]], tuple[Scenario, list[FleetJob]]]


def lost_sites(case: Scenario, jobs: list[FleetJob]) -> tuple[Scenario, list[FleetJob]]:
    """Every day one site is away for an hour, one after the other."""
    days, names = int(jobs[-1].submit_s / DAY_S), list(REGIONS)
    events: list[Any] = list(case.events)
    for day in range(days):
        site, begin = names[day % len(names)], day * DAY_S + 12 * HOUR_S
        events += [SiteLost(begin, site, 900.0), SiteBack(begin + HOUR_S, site)]
    return replace(case, events=sorted(events, key=lambda event: event.time_s)), jobs


def crowd(case: Scenario, jobs: list[FleetJob]) -> tuple[Scenario, list[FleetJob]]:
    """The 60 jobs in the middle come at once."""
    middle = len(jobs) // 2
    at_s = jobs[middle - 30].submit_s
    changed = [replace(job, submit_s=at_s) if middle - 30 <= i < middle + 30 else job for i, job in enumerate(jobs)]
    return case, changed


def thin_links(case: Scenario, jobs: list[FleetJob]) -> tuple[Scenario, list[FleetJob]]:
    """Links at a tenth for the first half."""
    links = {link.name: link.bandwidth_bytes_per_s for link in case.cluster.links}
    events: list[Any] = [LinkChanged(0.0, name, rate / 10) for name, rate in links.items()]
    events += [LinkChanged(jobs[-1].submit_s / 2, name, rate) for name, rate in links.items()]
    return replace(case, events=sorted([*case.events, *events], key=lambda event: event.time_s)), jobs


VARYING = ("virginia", "california", "frankfurt")


def changing(case: Scenario, until_s: float, every_s: float = 1800.0) -> tuple[Scenario, dict[str, list[Any]]]:
    """Some links at a share from a half to one of their rates, drawn anew so often; and that as a history."""
    draw, history = random.Random(1), dict[str, list[Any]]()
    for link in case.cluster.links:
        rate, varies = link.bandwidth_bytes_per_s, {link.source, link.target} <= set(VARYING)
        turns = range(int(until_s / every_s) if varies else 0)
        history[link.name] = [(every_s * turn, draw.uniform(0.5, 1.0) * rate) for turn in turns] or [(0.0, rate)]
    events = [LinkChanged(time_s, link, rate) for link, rows in history.items() for time_s, rate in rows]
    return replace(case, events=sorted([*case.events, *events], key=lambda event: event.time_s)), history


def late_links(starts: int) -> list[dict[str, Any]]:
    """Lines of the table of late rates."""
    steps, quotes, lines = StepTimes(), PlannerQuotes(scenario(0, 2.0).cluster), []
    for policy in (policy_of("bace"), FarpipePolicy()):
        found: dict[float, list[dict[str, float]]] = {}
        for start in range(starts):
            jobs = trace(start, steps)
            case, history = changing(scenario(start, 2.0), jobs[-1].submit_s)
            for minutes in (0.0, 1.0, 5.0, 30.0):
                outcome = play(case, jobs, LateLinks(policy, minutes, history), quotes=quotes, tick_s=0.0)
                found.setdefault(minutes, []).append(row(outcome, steps) | {"refused": outcome.num_refused})
        for minutes, rows in found.items():
            mean = {key: round(statistics.fmean(row[key] for row in rows), 2) for key in rows[0]}
            lines.append({"policy": policy.name, "rates late by min": minutes, "starts": starts} | mean)
            print(json.dumps(lines[-1]), flush=True)
    return lines


def affected(outcome: FleetOutcome, site: str, time_s: float) -> list[str]:
    """Jobs whose first devices are at `site` when it is lost at `time_s`: that is where their checkpoints are."""
    held: dict[str, Mapping[str, int]] = {}
    for change in outcome.changes:
        if change.time_s < time_s:
            held[change.job] = change.devices
    return [job for job, devices in held.items() if next(iter(devices), "") == site]


def copies(starts: int) -> None:
    """Print a line for every policy and time between two copies, over starts and sites that are lost for three days."""
    steps, quotes = StepTimes(), PlannerQuotes(scenario(0).cluster)
    found: dict[tuple[str, float], list[dict[str, float]]] = {}
    for name, start, site in product(("bace", "farpipe"), range(starts), REGIONS):
        case, jobs = scenario(start), jobs_of(philly(start, 0.9), steps)
        lost_s = jobs[len(jobs) // 2].submit_s
        outage = [SiteLost(lost_s, site, 900.0), SiteBack(lost_s + 3 * DAY_S, site)]
        events = sorted([*case.events, *outage], key=lambda event: event.time_s)
        rows = {}
        for hours in (0.0, 24.0, 6.0):
            stops = replace(case.stops, copy_every_s=hours * HOUR_S)
            lost = replace(case, stops=stops, events=events)
            outcome = play(lost, jobs, POLICIES[name], quotes=quotes, tick_s=0.0)
            ends = {record.job.name: record.jct_s or 0.0 for record in outcome.records}
            hit = rows[0.0]["hit"] if rows else affected(outcome, site, lost_s)
            data, left_h = outcome.to_data(), statistics.fmean(ends[job] for job in hit) / HOUR_S
            rows[hours] = {"hit": hit, "hit_h": left_h, "mean_h": data["mean_jct_s"] / HOUR_S}
            rows[hours] |= {
                "total_usd": data["total_usd"],
                "egress_usd": sum(figure or 0.0 for figure in data["money"]["egress"].values()),
            }
        for hours, cell in rows.items():
            cell |= {f"{key} %": 100 * (cell[key] / rows[0.0][key] - 1) for key in ("hit_h", "mean_h", "total_usd")}
            found.setdefault((name, hours), []).append({**cell, "hit": len(cell["hit"])})
            print(json.dumps({"policy": name, "hours": hours, "start": start, "site": site} | found[name, hours][-1]))
    for (name, hours), cells in found.items():
        line: dict[str, Any] = {"policy": name, "hours": hours, "outages": len(cells)}
        for key in cells[0]:
            figure = mean_interval([cell[key] for cell in cells])
            line[key] = f"{figure.mean:.1f} +- {figure.half_width:.1f}"
        print(json.dumps(line), flush=True)


def faults(policy: Policy) -> Sequence[tuple[str, Policy, Allocation]]:
    """Every fault by name: the policy under it, and what changes."""

    def same(case: Scenario, jobs: list[FleetJob]) -> tuple[Scenario, list[FleetJob]]:
        return case, jobs

    return [
        ("none", policy, same),
        ("estimates x 0.5 to 2", Misjudging(policy), same),
        ("a site lost for an hour a day", policy, lost_sites),
        ("60 jobs at once", policy, crowd),
        ("links at a tenth", policy, thin_links),
    ]


OWN = FarpipePolicy(electricity_only=True)
POLICIES = {"bace": policy_of("bace"), "farpipe for JCT and electricity": OWN, "farpipe": FarpipePolicy()}


class Bench:
    """Runs cells; objects that cells share are made once."""

    def __init__(self) -> None:
        self._steps, self._quotes = StepTimes(), PlannerQuotes(scenario(0).cluster)
        self._scenario = cache(scenario)

    def run(self, name: str, fault: str, start: int) -> Row:
        """The row of one policy under one fault."""
        seen, change = next((seen, change) for known, seen, change in faults(POLICIES[name]) if known == fault)
        case, jobs = change(self._scenario(start), jobs_of(philly(start, 0.9), self._steps))
        data = play(case, jobs, seen, quotes=self._quotes, tick_s=0.0).to_data()
        return {
            "policy": name,
            "fault": fault,
            "start": start,
            "mean_h": data["mean_jct_s"] / HOUR_S,
            "electricity_usd": sum(figure or 0.0 for figure in data["money"]["electricity"].values()),
            "total_usd": data["total_usd"],
            "queued_max_h": data["max_wait_s"] / HOUR_S,
            "num_finished": data["num_finished"],
        }


def table(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Means over the starts, in percent against the same policy and start without the fault."""
    lines = []
    by_cell = {(found["policy"], found["fault"], found["start"]): found for found in rows.values()}
    for name, fault in dict.fromkeys((policy, fault) for policy, fault, _ in by_cell):
        starts = [s for p, f, s in by_cell if (p, f) == (name, fault) and (name, "none", s) in by_cell]
        line: dict[str, Any] = {"policy": name, "fault": fault, "starts": len(starts)}
        for column in ("mean_h", "electricity_usd", "total_usd"):
            if starts:
                found = [[by_cell[name, kind, s][column] for s in starts] for kind in (fault, "none")]
                change, half = percent_change(*found)
                line[column + " %"] = f"{change:+.1f} +- {half:.1f}"
        longest = max((by_cell[name, fault, s]["queued_max_h"] for s in starts), default=None)
        lines.append(line | {"longest queued h": longest and round(longest)})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--links", action="store_true", help="late rates of links alone")
    parser.add_argument("--copies", action="store_true", help="copies of checkpoints alone")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after so long; the next call goes on")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "farpipe_fleet_comparison")
    given = parser.parse_args()
    if given.links or given.copies:
        (late_links if given.links else copies)(given.starts)
        return
    bench, names = Bench(), [fault for fault, _, _ in faults(OWN)]
    cells = [(p, fault, start) for start in range(given.starts) for p in POLICIES for fault in names]
    wanted = [(f"{p}|{fault}|{start}", partial(bench.run, p, fault, start)) for p, fault, start in cells]
    print(json.dumps(table(resumed(given.folder / "faults.jsonl", wanted, given.seconds)), indent=1))


if __name__ == "__main__":
    main()
