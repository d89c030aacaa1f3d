"""What the page shows, as tables and lines of text: every figure that is drawn is also here."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from farpipe.core.units import format_hours, format_percent, format_rate, format_seconds, printable
from farpipe.fleet.job import JobState
from farpipe.fleet.state import FleetState
from farpipe.report.figure import Markup, tag
from farpipe.report.tables import TableView
from farpipe.service.reading import Step
from farpipe.service.store import Row
from farpipe.service.views import AttemptView, JobView, LinkView, SiteSpent, SiteView
from farpipe.service.what_if import End

RECENT_S: Final = 86400.0
"""Age up to which a job that has failed needs attention."""
LEAST_FREE: Final = 0.1
"""Share of the disk that should be free."""
MOST_LINES: Final = 100


def moment(time_s: float | None) -> str:
    """A Unix time in UTC."""
    return "" if time_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))


def in_words(text: str) -> str:
    """A sentence of the core, with its Unix times in UTC."""
    return re.sub(r"\b(1[0-9]{9}) s\b", lambda found: f"{moment(float(found[1]))} UTC", text)


def link_to(name: str) -> Markup:
    """A job's name, which leads to its view."""
    return tag("a", name, href=f"/jobs/{name}")


def where(job: JobView) -> str:
    """Devices of a job."""
    return " > ".join(f"{number} at {site}" for site, number in job.devices.items())


def steps_done(job: JobView) -> str:
    """Whole steps done, of how many."""
    return f"{int(job.num_done):,} of {job.num_steps:,}"


def usd(amount: float) -> str:
    """Money, to a cent where that says something."""
    return f"${amount:,.2f}" if amount >= 1 or not amount else f"${amount:.2g}"


def live_jobs(jobs: Sequence[JobView], why: Mapping[str, str]) -> TableView:
    """Jobs that have not ended."""
    columns = ("job", "tenant", "phase", "where, or why it waits", "steps", "a step", "ends (UTC)", "cost")
    rows = tuple(
        (
            link_to(job.name),
            job.tenant,
            job.phase,
            where(job) or tag("div", why.get(job.name, ""), class_="why"),
            steps_done(job),
            format_seconds(job.step_s) if job.step_s else "",
            moment(job.end_s),
            usd(job.usd),
        )
        for job in jobs
    )
    done = tuple(job.num_done / job.num_steps for job in jobs)
    return TableView("Waiting and running", columns, rows, frozenset({4, 5, 7}), bars=((4, done),))


def ended_jobs(jobs: Sequence[JobView]) -> TableView:
    """Jobs that have ended, the newest first."""
    columns = ("job", "tenant", "result", "steps", "ended (UTC)", "cost", "why")
    rows = tuple(
        (
            link_to(job.name),
            job.tenant,
            job.result,
            steps_done(job),
            moment(job.end_s),
            usd(job.usd),
            job.why,
        )
        for job in jobs
    )
    return TableView("Ended", columns, rows, frozenset({3, 5}), note="The newest 100 are shown.")


def key_figures(job: JobView, steps: Sequence[Step], quote_s: float | None) -> list[tuple[str, str]]:
    """What people look for first."""
    found = [("phase", job.result or job.phase), ("steps", steps_done(job))]
    measured = [step.step_s for step in steps[-20:] if step.step_s is not None]
    losses = [step.loss for step in steps if step.loss is not None]
    if measured:
        found.append(("a step, measured", format_seconds(sorted(measured)[len(measured) // 2])))
    if quote_s:
        found.append(("a step, quoted", format_seconds(quote_s)))
    found += [("last loss", f"{losses[-1]:.4g}")] if losses else []
    found += [("ended (UTC)" if job.phase == "ended" else "ends (UTC)", moment(job.end_s))] if job.end_s else []
    found += [("deadline (UTC)", moment(job.deadline_s))] if job.deadline_s else []
    return [*found, ("in a checkpoint", f"{job.num_stored:,.0f}"), ("cost", usd(job.usd))]


def attempts_table(attempts: Sequence[AttemptView], last_lines: dict[int, str], link: str) -> TableView:
    """Starts of a job, the newest first; `link`: where the report of an attempt is, empty for none."""
    columns = ("attempt", "where", "began (UTC)", "lasted", "steps", "stored", "end", "reason", "last lines")
    rows = tuple(
        (
            tag("a", f"{one.attempt}", href=f"{link}{one.attempt}", title="Timeline and report")
            if link
            else f"{one.attempt}",
            one.place,
            moment(one.began_s),
            format_seconds(one.ended_s - one.began_s) if one.ended_s else "",
            f"{one.num_steps:,}",
            f"{one.num_stored:,}",
            one.result or "",
            one.why or "",
            tag("pre", lines, class_="log") if (lines := last_lines.get(one.attempt)) else "",
        )
        for one in reversed(attempts)
    )
    note = "An attempt's number leads to its report: the timeline, predicted above measured." if link else ""
    return TableView("Attempts", columns, rows, frozenset({3, 4, 5}), note=note)


def steps_table(steps: Sequence[Step]) -> TableView:
    """Steps of an attempt, evenly chosen."""
    chosen = steps[::-1][:: -(-len(steps) // MOST_LINES) or 1]
    rows = tuple(
        (
            f"{one.step:,}",
            format_seconds(one.step_s) if one.step_s is not None else "",
            "" if one.loss is None else f"{one.loss:.5g}",
        )
        for one in chosen
    )
    return TableView("Steps", ("step", "time", "loss"), rows, frozenset({0, 1, 2}))


def sites_table(sites: Sequence[SiteView]) -> TableView:
    """Sites, their devices, jobs and prices."""
    columns = ("site", "state", "used", "free", "of", "electricity", "carbon", "jobs")
    rows = tuple(
        (
            one.name,
            one.state,
            f"{one.num_used:,}",
            f"{one.num_free:,}",
            f"{one.num_devices:,}",
            f"${one.usd_per_mwh:g}/MWh",
            f"{one.carbon_g_per_kwh:g} g/kWh",
            ", ".join(one.jobs),
        )
        for one in sites
    )
    used = tuple(one.num_used / max(1, one.num_devices) for one in sites)
    return TableView("Sites", columns, rows, frozenset({2, 3, 4, 5, 6}), bars=((2, used),))


def links_table(links: Sequence[LinkView]) -> TableView:
    """Directed links and what jobs have reserved on them."""
    shares = tuple(one.reserved_bytes_per_s / one.bytes_per_s if one.bytes_per_s else 0.0 for one in links)
    rows = tuple(
        (
            one.name,
            format_rate(one.bytes_per_s) if one.bytes_per_s else "down",
            format_rate(one.reserved_bytes_per_s),
            format_percent(share),
            format_seconds(one.latency_s),
        )
        for one, share in zip(links, shares, strict=True)
    )
    numbers = frozenset({1, 2, 3, 4})
    return TableView("Links", ("link", "carries", "reserved", "share", "latency"), rows, numbers, bars=((3, shares),))


def of_fleet(state: FleetState, sites: Sequence[SiteView], silence: str, free: float) -> Iterator[str]:
    """What needs attention whoever looks: silence, lost sites, refusals, the disk."""
    if silence:
        yield f"The service can't see what runs: {silence}"
    yield from (f"Site {one.name} is {one.state}." for one in sites if one.state != "up")
    yield from (f"Link {name} is down." for name, rate in state.rates.items() if rate <= 0)
    if free < LEAST_FREE:
        yield f"The disk of the runs has {format_percent(free)} free."


def of_job(job: JobView, state: FleetState, now_s: float) -> Iterator[str]:
    """What needs attention about a job."""
    if job.phase == "ended":
        if job.result == "fail" and job.end_s is not None and now_s - job.end_s < RECENT_S:
            yield f"{job.name} failed at {moment(job.end_s)} UTC: {job.why}"
        return
    if job.num_failures:
        times = "once" if job.num_failures == 1 else f"{job.num_failures} times in a row"
        yield f"{job.name} has failed {times}: {in_words(job.why)}"
    if job.deadline_s is not None and (job.end_s or now_s) > job.deadline_s:
        yield f"{job.name} is late: its deadline is {moment(job.deadline_s)} UTC."
    core = state.jobs.get(job.name)
    late_s = now_s - _due_s(core) if core is not None else 0.0
    if core is not None and core.phase != "queued" and late_s > max(60.0, now_s - core.since_s - late_s):
        doing = {"starting": "start", "stopping": "stop"}.get(core.phase, "end")
        yield f"{job.name} should have come to its {doing} {format_seconds(late_s)} ago, and has said nothing."


def _due_s(job: JobState) -> float:
    """Time at which it should have come to the end of its phase."""
    if job.phase == "starting" and job.placement is not None:
        return job.since_s + job.placement.startup_s
    return job.stopped_by_s if job.phase == "stopping" else (job.end_s() or float("inf"))


def what_if_table(found: Mapping[str, tuple[End, End]]) -> TableView:
    """Ends of jobs with and without a change."""
    rows = tuple(
        (link_to(name), _end(before), _end(after), _shift(before, after)) for name, (before, after) in found.items()
    )
    return TableView(
        "Ends of jobs", ("job", "ends as it is (UTC)", "ends then (UTC)", "difference"), rows, frozenset({3})
    )


def _end(end: End) -> str:
    return moment(end.end_s) if end.end_s is not None else f"not: {in_words(end.why)}"


def _shift(before: End, after: End) -> str:
    if before.end_s is None or after.end_s is None:
        return ""
    shift_s = after.end_s - before.end_s
    if abs(shift_s) < 1:
        return "none"
    return f"{format_seconds(abs(shift_s))} {'later' if shift_s > 0 else 'earlier'}"


def accounts_table(jobs: Sequence[JobView]) -> TableView:
    """Money, energy and carbon by tenant and site, and all together."""
    sums = dict[tuple[str, str], SiteSpent]()
    for job in jobs:
        for site, spent in job.spent.items():
            for key in ((job.tenant, site), ("all", "")):
                known = sums.get(key, SiteSpent()).model_dump()
                sums[key] = SiteSpent(**{name: known[name] + value for name, value in spent.model_dump().items()})
    rows = tuple(
        (
            tenant,
            site,
            format_hours(one.device_hours),
            f"{one.energy_kwh:,.3g} kWh",
            f"{one.carbon_g / 1e3:,.3g} kg",
            usd(one.usd),
        )
        for (tenant, site), one in sorted(sums.items(), key=lambda item: (item[0][1] == "", item[0]))
    )
    columns = ("tenant", "site", "device-hours", "energy", "carbon", "cost")
    return TableView("Accounts", columns, rows, frozenset({2, 3, 4, 5}), len(rows) - 1 if rows else None)


def holdings_table(rows: Sequence[Row], now_s: float) -> TableView:
    """Attempts, with the devices that they had."""
    found = tuple(
        (
            link_to(one["job"]),
            f"{one['attempt']}",
            one["place"],
            moment(one["began_s"]),
            moment(one["ended_s"]) or "holds them",
            format_seconds((one["ended_s"] or now_s) - one["began_s"]),
        )
        for one in rows
    )
    columns = ("job", "attempt", "devices", "from (UTC)", "until (UTC)", "for")
    return TableView("Who had which devices", columns, found, frozenset({1, 5}))


def asked_table(rows: Sequence[Row]) -> TableView:
    """Who asked for what; tokens are named by their ids."""
    found = tuple((f"{one['number']}", moment(one["time_s"]), printable(one["who"])) for one in rows)
    return TableView("Who did what", ("line", "when (UTC)", "token and request"), found, frozenset({0}))
