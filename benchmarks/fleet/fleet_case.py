"""The fleet that the fleet benchmarks share: six AWS regions with measured links and 2024 prices, Philly's large jobs.

FARPIPE_DATA names the folder with jobs/, prices/ and wan/. Nothing is measured here.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.fleet.fleet_traces import RawJob, as_jobs, at_load, read_philly
from benchmarks.shared.data import data_folder
from farpipe.core.spec import Cluster, preset_site
from farpipe.fleet.job import FleetJob, Kind
from farpipe.fleet.quotes import PlannerQuotes
from farpipe.fleet.scenario import FleetFile, Scenario, resolve
from farpipe.optical.confidence import paired_change

DEVICES: Final = 64
REGIONS: Final = {
    "virginia": ("aws:us-east-1", "US-MIDA-PJM", 2.1),
    "california": ("aws:us-west-1", "US-CAL-CISO", 2.0),
    "frankfurt": ("aws:eu-central-1", "DE-LU", 2.3),
    "singapore": ("aws:ap-southeast-1", "SG", 2.4),
    "tokyo": ("aws:ap-northeast-1", "JP-TK", 2.5),
    "saopaulo": ("aws:sa-east-1", "BR-SP", 2.6),
}
"""Row of the matrices, electricity market, USD per device-hour (round figures of ours)."""
BEGIN: Final = datetime(2024, 1, 1)
DAYS_BETWEEN: Final = 8
"""Between two starts; the last one begins in March, and the longest trace then ends in June."""


def scenario(start: int = 0, bandwidth: float = 1.0, devices: int = DEVICES) -> Scenario:
    """The six regions from the `start`-th date on, links at `bandwidth` times what was measured."""
    folder = data_folder("jobs/, prices/ and wan/")
    written = {
        "clock": {"start": (BEGIN + timedelta(days=DAYS_BETWEEN * start)).isoformat()},
        "sites": [_site(name, *facts, devices) for name, facts in REGIONS.items()],
        "matrices": {
            "throughput": "wan/throughput_2022-01.csv",
            "rtt": "wan/rtt_2022-04.csv",
            "egress": "wan/egress_usd_per_gb_2023-02.csv",
            "scale": bandwidth,
        },
    }
    return resolve(FleetFile.model_validate(written), folder / "fleet")


def _site(name: str, region: str, market: str, rent: float, devices: int) -> dict[str, Any]:
    return {
        "name": name,
        "device": "a100-80gb",
        "num_devices": devices,
        "pue": 1.15,
        "rent_usd_per_device_hour": rent,
        "electricity": {"file": "prices/electricity_usd_per_mwh_2024_h1.csv", "column": market},
        "carbon": {"file": "prices/carbon_direct_g_per_kwh_2024_h1.csv", "column": market},
        "matrix_region": region,
    }


def percent_change(values: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Mean change against the other value of the same draw in percent, and half its 95 % interval; nan for one draw."""
    change = paired_change(values, baseline)
    return 100 * change.mean, 100 * change.half_width if len(values) > 1 else math.nan


class StepTimes:
    """Steps of a kind on so many A100 of one site."""

    def __init__(self) -> None:
        self._quotes = PlannerQuotes(Cluster(sites=(preset_site("one", "a100-80gb", 1024),)))

    def __call__(self, kind: Kind, num_devices: int) -> float:
        placement = self._quotes.placement(kind, (("one", num_devices),), {})
        assert placement is not None, (kind, num_devices)
        return placement.step_s


def philly(start: int, load: float, num_devices: int = 6 * DEVICES, num_jobs: int = 600) -> list[RawJob]:
    """Philly's jobs of 8 GPUs and more with twice the request, so many that `offered_load` is `load`.

    Every start has the same jobs with the same gaps, dealt out in another order.
    """
    raw = read_philly(data_folder("jobs/, prices/ and wan/") / "jobs" / "philly_first_half.csv")[:num_jobs]
    bodies = [(job.duration_s, 2 * job.num_devices, job.tenant) for job in raw]
    gaps = [later.submit_s - job.submit_s for job, later in pairwise(raw)]
    draw = random.Random(f"start {start}")
    draw.shuffle(bodies)
    turn = draw.randrange(len(gaps))
    times = [0.0]
    for gap in gaps[turn:] + gaps[:turn]:
        times.append(times[-1] + gap)
    shuffled = [RawJob(time_s, *body) for time_s, body in zip(times, bodies, strict=True)]
    return at_load(shuffled, num_devices, load)


def jobs_of(raw: Sequence[RawJob], steps: StepTimes, *, rigid: bool = False) -> list[FleetJob]:
    """As trainings: half to twice the request, or with `rigid` just the request."""
    return as_jobs(raw, steps, shrink=1 if rigid else 2, grow=1 if rigid else 2)


Row = dict[str, Any]


def load_rows(path: Path) -> dict[str, Row]:
    """Rows that have been computed, by key."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def resumed(path: Path, wanted: Sequence[tuple[str, Callable[[], Row]]], seconds: float) -> dict[str, Row]:
    """All rows of `path`, those of `wanted` that are missing computed and added, the first first, for so long."""
    rows, end = load_rows(path), time.monotonic() + seconds
    missing = [(key, run) for key, run in wanted if key not in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, (key, run) in enumerate(missing):
        if time.monotonic() > end:
            break
        print(f"{number + 1} of {len(missing)}: {key}", file=sys.stderr, flush=True)
        rows[key] = {"key": key} | run()
        with path.open("a") as file:
            file.write(json.dumps(rows[key]) + "\n")
    return rows
