"""Disjoint windows of several traces, three rents, wide jobs: python -m benchmarks.fleet.fleet_limits FILE.jsonl

FARPIPE_DATA names the folder with jobs/, prices/ and wan/. The fleet is that of fleet_comparison, whose starts deal one
set of jobs out anew; here every window has jobs of its own, in the order in which they came. Traces: Philly's jobs of 8
GPUs and more with twice the request, its jobs of 4 GPUs with four times the request, and draws like Acme's mix on
regions of 512 devices. Rents: round figures of ours, 2.3 USD per device-hour everywhere, and GCP's spot price of an
A100-80GB in the nearest region that lists one. `wide`: 24 rigid jobs of 13B to 70B, most of them wider than a region,
over regions of 16 to 128 devices with links of 25 to 100 Gbit/s. Runs that FILE.jsonl has are not done again.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.fleet.fleet_case import DEVICES, REGIONS, Row, StepTimes, jobs_of, load_rows, resumed, scenario
from benchmarks.fleet.fleet_comparison import LOADS, figures, variants
from benchmarks.fleet.fleet_tables import changes, head, line, mean_of
from benchmarks.fleet.fleet_traces import RawJob, acme_like, at_load, read_philly
from benchmarks.shared.data import data_folder
from farpipe.core.spec import Cluster
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.play import play
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.scenario import Scenario

TRACES: Final = ("philly, 8 GPUs and more", "philly, 4 GPUs", "like acme")
NUM_WINDOWS, NUM_DRAWS = 4, 10
FLAT_USD = 2.3
SPOT_USD: Final = {
    "virginia": 14.1576 / 8,
    "california": 15.712 / 8,
    "frankfurt": 17.3008 / 8,
    "singapore": 14.584 / 8,
    "tokyo": 14.584 / 8,
    "saopaulo": 10.6848 / 8,
}
"""USD per device-hour: eight A100-80GB in us-east4, us-central1, europe-west4, asia-southeast1 (twice) and us-east5, of
prices/gcp_gpu_rows_excerpt.csv."""
OTHERS: Final = ("bace", "srtf", "srtf with bace's places", "easy")
KINDS = (Kind("llama-2-13b", 4096, 512), Kind("qwen2.5-32b", 4096, 512), Kind("llama-3-70b", 4096, 1024))
STEPS = StepTimes()
QUOTES = cache(lambda devices: PlannerQuotes(scenario(devices=devices).cluster))


class Cell(NamedTuple):
    """One simulation of a window."""

    trace: str
    load: float
    rigid: bool
    rent: str
    window: int
    policy: str


def cells() -> Iterator[Cell]:
    """All of them."""
    for rent, sizes in (("listed", (False, True)), ("flat", (False,)), ("spot", (False,))):
        for trace in TRACES:
            for load in LOADS:
                for rigid in sizes:
                    for window in range(NUM_WINDOWS):
                        names = ("farpipe", *OTHERS)
                        yield from (Cell(trace, load, rigid, rent, window, name) for name in names)


def raw_jobs(trace: str, window: int) -> list[RawJob]:
    """A quarter of a trace, or a draw."""
    if trace == "like acme":
        return acme_like(150, window, mean_gap_s=600.0)
    path = data_folder("jobs/, prices/ and wan/") / "jobs" / "philly_first_half.csv"
    is_small = trace == "philly, 4 GPUs"
    known = [job for job in read_philly(path, 4) if (job.num_devices == 4) == is_small]
    size, times = len(known) // NUM_WINDOWS, 4 if is_small else 2
    return [replace(j, num_devices=times * j.num_devices) for j in known[window * size : (window + 1) * size]]


def at_rents(case: Scenario, usd: Sequence[float]) -> Scenario:
    """The case with a rent for each site."""
    sites = tuple(
        site.model_copy(update={"prices": site.prices.model_copy(update={"rent_usd_per_device_hour": rent})})
        for site, rent in zip(case.cluster.sites, usd, strict=True)
    )
    return replace(case, cluster=case.cluster.model_copy(update={"sites": sites}))


def windowed(cell: Cell) -> Row:
    """The row of one window, on the first start's prices."""
    devices = 512 if cell.trace == "like acme" else DEVICES
    case = scenario(devices=devices)
    if cell.rent != "listed":
        case = at_rents(case, [FLAT_USD if cell.rent == "flat" else SPOT_USD[name] for name in REGIONS])
    raw = at_load(raw_jobs(cell.trace, cell.window), len(REGIONS) * devices, cell.load)
    jobs = jobs_of(raw, STEPS, rigid=cell.rigid)
    outcome = play(case, jobs, variants()[cell.policy], quotes=QUOTES(devices), tick_s=0.0)
    start = NUM_WINDOWS * TRACES.index(cell.trace) + cell.window
    return cell._asdict() | {"start": start, "num_jobs": len(jobs)} | figures(outcome)


def wide_jobs(seed: int) -> tuple[Scenario, Sequence[FleetJob]]:
    """One job every ten minutes, each of about half an hour to three hours."""
    draw, case = random.Random(f"wide {seed}"), scenario()
    room = dict(zip(REGIONS, draw.sample((16, 32, 48, 64, 96, 128), 6), strict=True))
    rate = {name: draw.uniform(25e9, 100e9) / 8 for name in REGIONS}
    sites = tuple(site.model_copy(update={"num_devices": room[site.name]}) for site in case.cluster.sites)
    links = tuple(_fast(link, (rate[link.source] + rate[link.target]) / 2) for link in case.cluster.links)
    jobs = []
    for index in range(24):
        kind, number = draw.choice(KINDS), draw.choice((64, 96, 128, 160))
        num_steps = round(draw.uniform(0.5, 3.0) * 3600 / STEPS(kind, number))
        jobs.append(FleetJob(f"j{index}", kind, 600.0 * index, num_steps, number, number))
    return replace(case, cluster=Cluster(sites=sites, links=links)), jobs


def _fast(link: SiteLink, bytes_per_s: float) -> SiteLink:
    return link.model_copy(update={"bandwidth_bytes_per_s": bytes_per_s})


def wide(draw: int, name: str) -> Row:
    """The row of one draw of wide jobs."""
    case, jobs = wide_jobs(draw)
    outcome = play(case, jobs, variants()[name], tick_s=0.0)
    return {"policy": name, "start": draw, "trace": "wide"} | figures(outcome)


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Rows of the windows of which every policy finished every job: what some never start costs the others money."""
    unlike = {_window(row) for row in rows if row["num_finished"] < row["num_jobs"]}
    return [row for row in rows if _window(row) not in unlike]


def _window(row: Row) -> tuple[object, ...]:
    return row["start"], row["load"], row["rigid"], row["rent"]


def traces_table(rows: Sequence[Row]) -> None:
    """`farpipe` against each other policy, by trace and over all windows."""
    head("sizes", "trace", "load", *(name if " " in name else f"`{name}`" for name in OTHERS))
    for rigid in (False, True):
        for trace in (*TRACES, "all"):
            for load in LOADS:
                at = [r for r in rows if (r["rigid"], r["load"]) == (rigid, load) and trace in (r["trace"], "all")]
                cells = [changes(at, "farpipe", name, "mean_h", "electricity_usd", "total_usd") for name in OTHERS]
                line(["rigid" if rigid else "elastic", trace, load, *cells])


def rents_table(rows: Sequence[Row]) -> None:
    """The same over all windows with elastic sizes, by rent."""
    head("rent", "load", *(name if " " in name else f"`{name}`" for name in OTHERS))
    for rent in ("listed", "flat", "spot"):
        for load in LOADS:
            at = [r for r in rows if (r["rent"], r["load"], r["rigid"]) == (rent, load, False)]
            cells = [changes(at, "farpipe", name, "mean_h", "electricity_usd", "total_usd") for name in OTHERS]
            line([rent, load, *cells])


def tails_table(rows: Sequence[Row]) -> None:
    """Tails over all windows with elastic sizes."""
    head("load", "policy", "mean JCT h", "p95", "p99 of queued h", "longest", "stops", "moves")
    for load in LOADS:
        at = [r for r in rows if r["load"] == load and not r["rigid"]]
        for name in ("farpipe", *OTHERS):
            columns = ("mean_h", "p95_h", "queued_p99_h", "queued_max_h", "num_stops", "num_moves")
            line([load, name if " " in name else f"`{name}`", *(f"{mean_of(at, name, c):.1f}" for c in columns)])


def wide_table(rows: Sequence[Row]) -> None:
    """Mean JCT of wide jobs, and the changes."""
    names = ("farpipe", "easy", "srtf", "bace")
    head("", *(f"`{name}`" for name in names))
    line(["mean JCT h", *(f"{mean_of(rows, name, 'mean_h'):.2f}" for name in names)])
    line(["`farpipe` against, %", "", *(changes(rows, "farpipe", name, "mean_h") for name in names[1:])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long; the next call goes on")
    given = parser.parse_args()
    wanted = [(" ".join(map(str, cell)), partial(windowed, cell)) for cell in cells()]
    names = ("farpipe", "easy", "srtf", "bace")
    wanted += [(f"wide {draw} {name}", partial(wide, draw, name)) for draw in range(NUM_DRAWS) for name in names]
    rows = resumed(given.file, wanted, given.seconds) if given.seconds else load_rows(given.file)
    found = comparable([row for row in rows.values() if row["trace"] != "wide"])
    listed = [row for row in found if row["rent"] == "listed"]
    for show, at in ((traces_table, listed), (rents_table, found), (tails_table, listed)):
        print()
        show(at)
    print()
    wide_table([row for row in rows.values() if row["trace"] == "wide"])


if __name__ == "__main__":
    main()
