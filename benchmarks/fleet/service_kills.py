"""Deaths of a fleet's service, at random and at its fault points, while real trainings run: what is lost or done twice.

    python -m benchmarks.fleet.service_kills --rounds 50 [--database URL] [--jobs 12]
    python -m benchmarks.fleet.service_kills --pair --rounds 20

Each round kills the service (or has it kill itself) and starts it again; with `--pair` two instances share a database,
and the leader is killed or stopped for longer than its lease. A further job is submitted where the service is to die
at a start, and cancelled as well where it is to die at a stop. Every job whose submission was answered has to end, with
one attempt, whose steps are there once each. It prints `lost=[] started_twice={}`.
"""

import argparse
import json
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.fleet.faulty_service import POINTS
from services import Spawned, free_port, job_toml, until

PROGRAM = (str(Path(__file__).with_name("faulty_service.py")),)
STEPS = 20
LIMIT_S = 1200.0


class Owner:
    """Somebody who submits jobs, again and again until each is answered, whichever instance answers."""

    def __init__(self, services: list[Spawned], num_jobs: int, pause_s: float) -> None:
        self.services, self.answered, self.cancelled = services, list[str](), set[str]()
        self._names, self._pause_s = [f"job-{k}" for k in range(num_jobs)], pause_s
        self.threads = [threading.Thread(target=self._submit, daemon=True)]
        self.threads[0].start()

    def also(self, name: str, *, cancels: bool) -> None:
        """Submit one more job beside the others, and cancel it."""
        self.threads.append(threading.Thread(target=self._also, args=(name, cancels), daemon=True))
        self.threads[-1].start()

    def _also(self, name: str, cancels: bool) -> None:
        until(lambda: self.ask("submit", name), LIMIT_S)
        self.answered.append(name)
        if cancels:
            self.cancelled.add(name)
            until(lambda: self.ask("cancel", name), LIMIT_S)

    def _submit(self) -> None:
        for name in self._names:
            until(lambda name=name: self.ask("submit", name), LIMIT_S)
            self.answered.append(name)
            time.sleep(random.uniform(0.5, 1.5) * self._pause_s)

    def ask(self, what: str, name: str = "") -> httpx.Response | None:
        """The first good answer of an instance; None: none can answer now."""
        for service in self.services:
            try:
                asking = service.operator()
                with asking.http:
                    if what == "submit":
                        answer = asking.submit(name, job_toml(STEPS))
                    else:
                        answer = asking("POST", f"jobs/{name}/cancel") if name else asking("GET", "jobs")
            except (OSError, httpx.HTTPError):  # killed before or in its answer
                continue
            if answer.is_success:
                return answer
            assert answer.status_code == 503, answer.text
        return None


def killed(service: Spawned, owner: Owner, number: int) -> str:
    """Kill the service at random after it is ready, or start it so that it dies at one of its points."""
    point = POINTS[number // 2 % len(POINTS)] if number % 2 else ""
    if not point:
        time.sleep(random.uniform(0.05, 3.0))
        service.kill()
        service.env |= {"FAULT": "0"}
        service.start()
        return "at random"
    service.kill()
    service.env |= {"FAULT": "0.6", "POINT": point}
    service.start()
    if point.endswith(("start", "begin", "stop")):
        owner.also(f"more-{number}", cancels=point.endswith("stop"))
    end_s = time.monotonic() + 60.0
    while not service.has_died() and time.monotonic() < end_s:
        time.sleep(0.05)
    how = point if service.has_died() else f"{point} not met"
    service.kill()
    service.env |= {"FAULT": "0"}
    service.start()
    return how


def deposed(services: list[Spawned], number: int) -> str:
    """Kill the leader, or stop it until another leads."""
    leader = until(lambda: next((one for one in services if leads(one)), None), 60.0)
    begin = time.monotonic()
    if number % 2:
        leader.process.send_signal(signal.SIGSTOP)
    else:
        leader.kill()
    other = until(lambda: next((one for one in services if one is not leader and leads(one)), None), 60.0)
    took = time.monotonic() - begin
    if number % 2:
        leader.process.send_signal(signal.SIGCONT)
    else:
        leader.start()
        leader.until_ready()
    return f"{'stopped' if number % 2 else 'killed'}, {other.port} leads after {took:.1f} s"


def leads(service: Spawned) -> bool:
    """True for the instance that says that it leads."""
    try:
        found = httpx.get(f"{service.url}/ready", timeout=2, trust_env=False)
        return found.is_success and found.json()["instance"] == found.json()["leader"]
    except httpx.HTTPError:
        return False


def judged(root: Path, owner: Owner) -> tuple[list[str], dict[str, object]]:
    """Jobs that were answered and did not end well, and those with several attempts or steps done twice."""

    def ended() -> list[dict] | None:
        answer = owner.ask("jobs")
        found = answer.json()["jobs"] if answer else []
        return found if len(found) >= len(owner.answered) and all(one["phase"] == "ended" for one in found) else None

    found = {one["name"]: one for one in until(ended, LIMIT_S)}
    ends = {name: "cancel" if name in owner.cancelled else "finish" for name in owner.answered}
    lost = [name for name, end in ends.items() if found.get(name, {}).get("result") != end]
    twice = dict[str, object]()
    for name in owner.answered:
        paths = sorted((root / "runs" / name).glob("*/run/metrics.jsonl"))
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        steps = Counter(line["step"] for line in lines if "loss" in line)
        is_once = set(steps.values()) <= {1} if name in owner.cancelled else steps == Counter(range(STEPS))
        if len(paths) > 1 or not is_once:
            twice[name] = len(paths), dict(steps)
    return lost, twice


def trial(root: Path, rounds: int, num_jobs: int, database: str | None, is_pair: bool) -> tuple[list[str], dict]:
    """What was lost and what was started twice, in so many rounds."""
    more = ["--database", database] if database else []
    services = [Spawned(root, *more, port=free_port(), program=PROGRAM, env={"FAULT": "0"}) for _ in range(1 + is_pair)]
    try:
        assert all(service.until_ready() for service in services)
        owner = Owner(services, num_jobs, rounds * (15.0 if is_pair else 4.0) / num_jobs / 2)
        for number in range(rounds):
            print(number, deposed(services, number) if is_pair else killed(services[0], owner, number), flush=True)
        assert all(service.until_ready() for service in services)
        for thread in owner.threads:
            thread.join(LIMIT_S)
        return judged(root, owner)
    finally:
        for service in services:
            service.kill()


def main() -> None:
    """Run a trial and print its verdict."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--database")
    parser.add_argument("--pair", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills.", dir="/tmp") as root:
        lost, twice = trial(Path(root), given.rounds, given.jobs, given.database, given.pair)
    print(f"{lost=} started_twice={twice}")
    raise SystemExit(bool(lost or twice))


if __name__ == "__main__":
    main()
