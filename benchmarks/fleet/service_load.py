"""Load of a fleet's service: CPU time for each event, and for a restart with a long log and many jobs.

    python -m benchmarks.fleet.service_load [--rate 50] [--seconds 60] [--events 20000] [--jobs 500]

Nine tenths of the events are step reports, which the service reads from its launcher's files, and a tenth are
submissions over HTTP, each sent at its due time (an open loop). Attempts are without processes: the CPU is that of the
service, of its process alone, under the policy easy with SQLite on a disk. Limits: 10 ms an event, 5 s a restart.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.fleet.fleet_speed import cluster_of
from farpipe.fleet.events import JobStarted, JobSubmitted, StepReported
from farpipe.fleet.policies import policy_of
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.state import first_state
from farpipe.service.decisions import change_of
from farpipe.service.store import Store
from farpipe.service.views import Submission
from farpipe.testing.policies import SimpleQuotes
from services import Attempts, Threaded, job_toml

CLUSTER = cluster_of(4, 2000)
STEPS = 1_000_000


class Reporting(Attempts):
    """Attempts of which so many together have a new, slower or faster step at each look."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.due, self.turn = rate, 0.0, 0

    def look(self, keys):
        found = super().look(keys)
        alive = [key for key, seen in found.items() if seen.state == "alive"]
        self.due += self.rate
        for _ in range(int(self.due) if alive else 0):
            self.turn += 1
            place = alive[self.turn % len(alive)], "run/metrics.jsonl"
            before = self.files.get(place, b"")
            step_s = 1.0 + before.count(b"\n") % 2
            line = {"step": before.count(b"\n"), "attempt": 0, "step_s": step_s, "loss": 1.0}
            self.files[place] = before + json.dumps(line).encode() + b"\n"
            self.due -= 1.0
        return found


def written(root: Path, num_events: int, num_jobs: int) -> None:
    """A database with a log of so many events and so many running jobs."""
    store = Store(f"sqlite:///{root}/fleet.sqlite")
    store.migrate()
    state = first_state(CLUSTER, policy_of("easy"), SimpleQuotes(), StopCosts(stop_s=30.0))
    begin_s = time.time() - num_events
    for number in range(num_events):
        now_s, name = begin_s + number, f"old-{number % num_jobs}"
        jobs = []
        if number < num_jobs:
            asked = Submission(name=name, job=job_toml(STEPS))
            job = asked.to_job("t", now_s)
            event = JobSubmitted(now_s, job)
            jobs = [{"name": name, "tenant": "t", "submission": asked.model_dump_json(), "submitted_s": now_s}]
        elif number < 2 * num_jobs:
            event = JobStarted(now_s, name, 1)
        else:
            event = StepReported(now_s, name, 1, float(number // num_jobs), 1.0 + number % 3)
        after, commands = state.handle(event)
        store.write(change_of(state, [event], after, commands, jobs), after)
        state = after
    store.close()


async def loaded(service: Threaded, rate: float, seconds: float) -> list[float]:
    """Latencies of the submissions, each from its due time on."""
    latencies = list[float]()
    headers = dict(service.operator().http.headers)
    async with httpx.AsyncClient(base_url=service.url, headers=headers, timeout=60) as client:

        async def submit(number: int, due_s: float) -> None:
            body = {"name": f"new-{number}", "job": job_toml(STEPS)}
            answer = await client.post("/v1/jobs", json=body)
            assert answer.status_code == 201, answer.text
            latencies.append(time.monotonic() - due_s)

        begin_s, tasks = time.monotonic(), list[asyncio.Task[None]]()
        for number in range(int(seconds * rate / 10)):
            due_s = begin_s + number * 10 / rate
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(asyncio.create_task(submit(number, due_s)))
        await asyncio.gather(*tasks)
    return sorted(latencies)


def main() -> None:
    """Measure and print both figures."""
    parser = argparse.ArgumentParser()
    for name, value in (("rate", 50.0), ("seconds", 60.0), ("events", 20_000), ("jobs", 500)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load.", dir="/tmp") as folder:
        written(Path(folder), given.events, given.jobs)
        launcher = Reporting(0.0)
        begin_s = time.process_time()
        service = Threaded(folder, launcher=launcher, cluster=CLUSTER, policy="easy")
        restart_s = time.process_time() - begin_s
        print(f"restart with {given.events} events and {given.jobs} jobs: {restart_s:.2f} s of CPU, imports apart")
        time.sleep(3.0)
        launcher.rate = 0.9 * given.rate
        events, cpu_s = service.instance.num_events, time.process_time()
        latencies = asyncio.run(loaded(service, given.rate, given.seconds))
        cpu_s, events = time.process_time() - cpu_s, service.instance.num_events - events
        service.close()
    print(f"{events} events in {given.seconds:g} s: {1000 * cpu_s / events:.1f} ms of CPU each, the client's included")
    p50, p99 = (1000 * latencies[int(len(latencies) * q)] for q in (0.5, 0.99))
    print(f"submissions answered after {p50:.0f} ms (median), {p99:.0f} ms (99 of 100)")


if __name__ == "__main__":
    main()
