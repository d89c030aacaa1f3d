"""The fleet's simulator against its service: real trainings, then their log played again. Prints JSON.

    python -m benchmarks.fleet.service_replay [--jobs 8] [--pause 6] [--policy fcfs]

The service runs trainings of unlike lengths, each of two ranks, on two sites of two devices, so that half of them wait.
The simulator gets the same submissions, for every job its measured seconds a step, and one time of a start: the
mean of the measured ones. `error` is each job's simulated time from submission to end over the measured one, less 1.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from farpipe.fleet.job import FleetJob, JobPlacement, Kind
from farpipe.fleet.play import configured
from farpipe.fleet.policies import policy_of
from farpipe.fleet.quotes import Devices, StopCosts
from farpipe.fleet.scenario import load_scenario
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import first_state
from services import Asking, Spawned, job_toml, until

LIMIT_S = 560.0
NUM_STEPS = (3000, 1000, 2000, 500, 4000, 1500, 2500, 750)
NUM_DEVICES = 2


class Measured:
    """Quotes with the seconds a step that a job was measured to take, for a kind that has the job's name."""

    def __init__(self, step_s: Mapping[str, float]) -> None:
        self._step_s = step_s

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> JobPlacement | None:
        """As in `Quotes`; the trainings are of one site."""
        return JobPlacement(devices, self._step_s[kind.model]) if len(devices) == 1 else None

    def state_bytes(self, kind: Kind) -> float:
        """None to speak of."""
        return 0.0

    def needed_rate(self, kind: Kind, num_devices: int) -> float | None:
        """No link is needed."""
        return None


def entries(ask: Asking) -> list[dict[str, Any]]:
    """Events of the service's whole log."""
    found, after = list[dict[str, Any]](), 0
    while page := ask("GET", "log", after=after, limit=1000).json():
        found += [event for one in page for event in one["entry"]["events"]]
        after = page[-1]["number"]
    return found


def measured(root: Path, num_jobs: int, pause_s: float, policy: str) -> list[dict[str, Any]]:
    """Of every job: steps, when it was submitted, started and ended, and its mean seconds a step."""
    service = Spawned(root, "--policy", policy)
    try:
        assert service.until_ready()
        ask = service.operator()
        for number in range(num_jobs):
            answer = ask.submit(f"job-{number}", job_toml(NUM_STEPS[number % len(NUM_STEPS)]))
            assert answer.is_success, answer.text
            time.sleep(pause_s)
        until(lambda: all(one["phase"] == "ended" for one in ask("GET", "jobs").json()["jobs"]), LIMIT_S)
        jobs = ask("GET", "jobs").json()["jobs"]
        events = entries(ask)
    finally:
        service.kill()
    began = {event["name"]: event["time_s"] for event in events if event["event"] == "JobStarted"}
    for job in jobs:
        assert job["result"] == "finish", job
        lines = (root / "runs" / job["name"] / "1" / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [line for line in map(json.loads, lines) if "step_s" in line]
        job["measured_step_s"] = fmean(line["step_s"] + line.get("pause_s", 0.0) for line in steps)
        job["start_s"] = began[job["name"]] - job["started_s"]
    return sorted(jobs, key=lambda job: job["submitted_s"])


def simulated(root: Path, jobs: list[dict[str, Any]], policy: str) -> dict[str, float]:
    """End of every job in the simulator."""
    start_s = fmean(job["start_s"] for job in jobs)
    quotes = Measured({job["name"]: job["measured_step_s"] for job in jobs})
    stops = StopCosts(restart_s=start_s, stop_s=10.0, first_pause_s=0.0)
    scenario = load_scenario(root / "fleet.toml")
    state = first_state(scenario.cluster, configured(policy_of(policy), scenario), quotes, stops)
    wanted = [
        FleetJob(job["name"], Kind(job["name"], 1, 1), job["submitted_s"], job["num_steps"], NUM_DEVICES, NUM_DEVICES)
        for job in jobs
    ]
    return {one.job.name: one.finished_s for one in Simulator(state).run(wanted).records}


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--pause", type=float, default=6.0)
    parser.add_argument("--policy", default="fcfs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replay.", dir="/tmp") as folder:
        jobs = measured(Path(folder), given.jobs, given.pause, given.policy)
        ends = simulated(Path(folder), jobs, given.policy)
    rows = [
        {
            "job": job["name"],
            "num_steps": job["num_steps"],
            "start_s": round(job["start_s"], 2),
            "step_ms": round(1e3 * job["measured_step_s"], 3),
            "measured_s": round(job["end_s"] - job["submitted_s"], 2),
            "simulated_s": round(ends[job["name"]] - job["submitted_s"], 2),
            "error": (ends[job["name"]] - job["submitted_s"]) / (job["end_s"] - job["submitted_s"]) - 1,
        }
        for job in jobs
    ]
    median_error = median(abs(row["error"]) for row in rows)
    print(json.dumps({"jobs": rows, "median_error": median_error, "start_s": fmean(row["start_s"] for row in rows)}))


if __name__ == "__main__":
    main()
