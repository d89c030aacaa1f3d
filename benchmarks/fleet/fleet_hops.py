"""Gap between the closed form of hops and the planner's quotes: python -m benchmarks.fleet.fleet_hops

Jobs over two and three of the six regions of fleet_case.py, links at 0.5, 1 and 2 times what keeps the closed form from
stalling: seconds of a step by the formula and by the planner on just those devices and links. FARPIPE_DATA names the
folder with the measured links.
"""

import json
import time
from itertools import pairwise

from benchmarks.fleet.fleet_case import scenario
from farpipe.fleet.job import Kind
from farpipe.fleet.quotes import PlannerQuotes

KINDS = (
    Kind("llama-3.2-1b", 2048, 256),
    Kind("llama-3-8b", 4096, 256),
    Kind("llama-2-13b", 4096, 512),
    Kind("llama-3-70b", 4096, 1024),
)
PLACES = (
    (("virginia", 16), ("california", 16)),
    (("virginia", 32), ("frankfurt", 32)),
    (("virginia", 64), ("tokyo", 64)),
    (("virginia", 32), ("california", 32), ("tokyo", 32)),
)


def main() -> None:
    cluster = scenario(0).cluster
    formula, planned = PlannerQuotes(cluster, hop_quotes="closed-form"), PlannerQuotes(cluster)
    for kind in KINDS:
        for devices in PLACES:
            needed = formula.needed_rate(kind, sum(number for _, number in devices))
            for share in (0.5, 1.0, 2.0) if needed else ():
                pairs = [(a, b) for (a, _), (b, _) in pairwise(devices)]
                names = [name for a, b in pairs for name in (f"{a}>{b}", f"{b}>{a}")]
                rates = dict.fromkeys(names, share * (needed or 0.0))
                one, begin = formula.placement(kind, devices, rates), time.perf_counter()
                other = planned.placement(kind, devices, rates)
                line = {
                    "model": kind.model,
                    "devices": [number for _, number in devices],
                    "rate": share,
                    "formula_s": one and round(one.step_s, 2),
                    "planner_s": other and round(other.step_s, 2),
                    "change_%": round(100 * (one.step_s / other.step_s - 1)) if one and other else None,
                    "crosses": bool(other and any(other.link_bytes_per_s.values())),
                    "ms": round(1e3 * (time.perf_counter() - begin)),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
