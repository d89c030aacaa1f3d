"""A fleet of two sites here trains four jobs; one site is cut off, given up and comes back: `make fleet-demo`.

The core decides, launchers start real processes at each site, and a loop makes what runs equal to what is decided. The
cut site trains on where nobody sees it; its job starts again elsewhere, and the old attempt is stopped before anything
starts there. The losses of all jobs are those of the same training without a fleet, bit by bit.
"""

import tempfile
import time
from pathlib import Path

import farpipe
from farpipe.core.errors import RunError
from farpipe.core.spec.load import parse_job
from farpipe.engine.figures.metrics import read_metrics
from farpipe.fleet.events import JobSubmitted, Tick
from farpipe.fleet.job import FleetJob
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import PlannerQuotes, StopCosts
from farpipe.fleet.requests import kind_of
from farpipe.fleet.state import first_state
from farpipe.service.door import Door
from farpipe.service.launcher import Key
from farpipe.service.order import ORDER_NAME, Order
from farpipe.service.reconcile import Reconciler
from farpipe.service.sites import SitesLauncher
from farpipe.service.submission import submitted_job

JOB = """
[model]
num_layers = 4
hidden = 32
num_heads = 2
ffn_hidden = 64
vocab_size = 256
[training]
sequence_length = 16
global_batch = 8
microbatch_size = 2
precision = "fp32"
num_steps = 300
checkpoint_every_minutes = 0
[layout]
pipeline = 2
[[cluster.sites]]
name = "zurich"
device = "cpu"
num_devices = 2
[[cluster.sites]]
name = "lugano"
device = "cpu"
num_devices = 2
[[cluster.links]]
between = ["zurich", "lugano"]
latency = "1 ms"
bandwidth = "10 Gbit/s"
"""
NAMES = ("amber", "birch", "cedar", "dogwood")
NUM_STEPS = 300
LIMIT_S = 280.0


class Fleet:
    """The core with a clock and a launcher; a service adds the database and the API."""

    def __init__(self, root: Path) -> None:
        cluster = parse_job(JOB).cluster
        self.cut, self.ended, self.begin_s = set[str](), list[str](), time.monotonic()
        self.launcher = SitesLauncher(
            root, {site.name: self.door(site.name, root) for site in cluster.sites}, emulates=True, lost_after_s=2.0
        )
        stops = StopCosts(restart_s=5.0, stop_s=10.0, first_pause_s=0.0)
        self.state = first_state(cluster, POLICIES["fcfs"], PlannerQuotes(cluster), stops)
        self.loop = Reconciler(self.launcher, root, cluster, dict.fromkeys(NAMES, JOB), leave_s=30.0)

    def door(self, site, root):
        """A site that answers unless it is cut off."""
        answer = Door(site=site, root=root).answer

        def ask(request):
            if site in self.cut:
                raise RunError("no route to host")
            return answer(request)

        return ask

    def give(self, *events) -> None:
        """Tell the core, and print what it has done."""
        self.state, _ = self.state.handle(*events)
        for done in self.state.done:
            where = "" if done.placement is None else f" at {', '.join(done.placement.sites)}"
            print(f"{time.monotonic() - self.begin_s:5.0f} s  {done.name}: {done.what}{where} {done.why}", flush=True)
            self.ended += [done.name] if done.what == "finish" else []

    def now_s(self) -> float:
        """The wall clock, which never goes back."""
        return max(self.state.now_s, time.time())

    def until(self, is_reached) -> None:
        """Pass after pass."""
        while not is_reached():
            if time.monotonic() > self.begin_s + LIMIT_S:
                raise SystemExit(f"not done within {LIMIT_S:g} s: {self.state.jobs}")
            self.give(*self.loop.step(self.state, self.now_s()), Tick(self.now_s()))
            time.sleep(0.5)

    def submit(self, name: str) -> None:
        """A job of two ranks."""
        now_s = self.now_s()
        self.give(JobSubmitted(now_s, FleetJob(name, kind_of(submitted_job(JOB)), now_s, NUM_STEPS, 2, 2)))

    def losses(self, key: Key) -> list[float]:
        """Of an attempt."""
        return losses(self.loop.folder(key) / "run")


def losses(run_dir: Path) -> list[float]:
    """Losses of all steps of a run."""
    return [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]


def main(root: Path) -> None:
    """Run the fleet; SystemExit says what was not as it should be."""
    fleet = Fleet(root / "runs")
    for name in NAMES:
        fleet.submit(name)
    victim = next(name for name, job in fleet.state.jobs.items() if job.placement is not None)
    site = fleet.state.jobs[victim].placement.sites[0]
    fleet.until(lambda: fleet.state.jobs[victim].num_reported > 0)
    print(f"cut off: {site}, where {victim} trains")
    fleet.cut.add(site)
    fleet.until(lambda: not fleet.state.sites[site].is_up)
    print(f"back: {site}")
    fleet.cut.clear()
    fleet.until(lambda: len(fleet.ended) == len(NAMES))
    attempts = {name: len([*(root / "runs" / name).iterdir()]) for name in NAMES}
    old = fleet.launcher.look([Key(victim, 1)])[Key(victim, 1)]
    order = Order.load(fleet.loop.folder(Key(victim, 2)) / ORDER_NAME)
    plain = farpipe.train(order.plan().plan, root / "plain", num_steps=NUM_STEPS)
    expected = [line["loss"] for line in plain.metrics if "loss" in line]
    same = [name for name in NAMES if fleet.losses(Key(name, attempts[name])) == expected]
    print(f"attempts: {attempts}; the cut one: {old.state}, exit code {old.exit_code}")
    print(f"losses as without a fleet, bit by bit: {', '.join(same)}")
    if same != [*NAMES] or attempts != {name: 2 if name == victim else 1 for name in NAMES}:
        raise SystemExit("not as it should be")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="farpipe-fleet-") as folder:
        main(Path(folder).resolve())
