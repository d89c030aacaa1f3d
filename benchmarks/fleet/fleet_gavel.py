"""Our simulator beside Gavel's on one cluster: python -m benchmarks.fleet.fleet_gavel GAVEL [--devices 25]

GAVEL: a checkout of github.com/stanford-futuredata/gavel. Its trace of 100 jobs (traces/physical_cluster/
minimize_makespan.trace: rigid, 1 to 4 GPUs, all there at the start) with its measured V100 throughputs, on one site;
stops cost nothing. Its own figures for the same come from its own program, on as many V100 and nothing else:

    python scripts/drivers/simulate_scheduler_with_trace.py -t TRACE -p fifo -c 25:0:0 --seed 0
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from farpipe.core.spec import Cluster, preset_site
from farpipe.fleet.job import FleetJob, JobPlacement, Kind
from farpipe.fleet.policies import policy_of
from farpipe.fleet.quotes import Devices, StopCosts
from farpipe.fleet.simulator import Simulator
from farpipe.fleet.state import first_state

TRACE, THROUGHPUTS = "traces/physical_cluster/minimize_makespan.trace", "simulation_throughputs.json"
POLICIES = ("fcfs", "easy", "sjf", "srtf", "las", "farpipe")


class Measured:
    """Quotes that are Gavel's measured throughputs; the kind's model is the job type."""

    def __init__(self, steps_per_s: Mapping[tuple[str, int], float]) -> None:
        self._steps_per_s = steps_per_s

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> JobPlacement | None:
        """As in `Quotes`."""
        ((site, number),) = devices
        rate = self._steps_per_s.get((kind.model, number))
        return JobPlacement(devices, 1 / rate, {}, {site: 300.0 * number}) if rate else None

    def state_bytes(self, kind: Kind) -> float:
        """As in `Quotes`."""
        return 0.0

    def needed_rate(self, kind: Kind, num_devices: int) -> float | None:
        """As in `Quotes`."""
        return 0.0


def read(folder: Path) -> tuple[list[FleetJob], Measured]:
    """The jobs and their speeds on V100."""
    table = json.loads((folder / THROUGHPUTS).read_text())["v100"]
    lines = [line.split("\t") for line in (folder / TRACE).read_text().splitlines()]
    found = {(f[0], int(f[6])): table[str((f[0], int(f[6])))]["null"] for f in lines}
    jobs = [
        FleetJob(f"job{index:03}", Kind(f[0], 1, 1), float(f[9]), int(f[5]), int(f[6]), int(f[6]))
        for index, f in enumerate(lines)
    ]
    return jobs, Measured(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("gavel", type=Path)
    parser.add_argument("--devices", type=int, default=25)
    given = parser.parse_args()
    folder = given.gavel / "scheduler" if (given.gavel / "scheduler").is_dir() else given.gavel
    jobs, quotes = read(folder)
    cluster = Cluster(sites=(preset_site("one", "v100", given.devices),))
    free = StopCosts(restart_s=0.0)
    for name in POLICIES:
        outcome = Simulator(first_state(cluster, policy_of(name), quotes, free)).run(jobs)
        mean = sum(outcome.jcts_s) / len(outcome.jcts_s) / 3600
        print(json.dumps({"policy": name, "mean_jct_h": round(mean, 2), "use": round(outcome.utilization, 3)}))


if __name__ == "__main__":
    main()
