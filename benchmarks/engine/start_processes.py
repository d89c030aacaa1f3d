"""Start of 8, 32 and 64 real processes on one machine, in two sites, until all are connected. Prints JSON.

`start_s` is from the launcher's begin until the last process has done the exchange that begins a run, `connect_s` from
the moment when the last process has loaded its modules (torch among them: a core for a second or two
per process) until then: rendezvous, listeners, control connections, exchange. `memory_mib` is that of all processes
at the end.

    python -m benchmarks.engine.start_processes [NUM_PROCESSES...]
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

SIZES = (8, 32, 64)


def main(sizes: list[int]) -> None:
    from farpipe.engine.launch.launcher import launch

    for num_processes in sizes:
        begin_s = time.time()
        with tempfile.TemporaryDirectory() as folder:
            launch(
                lambda _, place=folder: [sys.executable, __file__, "--rank", place], num_processes, log_dir=Path(folder)
            )
            ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_processes)]
        loaded_s, done_s = (max(rank[name] for rank in ranks) for name in ("loaded_s", "done_s"))
        row = {"num_processes": num_processes, "start_s": done_s - begin_s, "connect_s": done_s - loaded_s}
        row["memory_mib"] = sum(rank["memory_mib"] for rank in ranks)
        print(json.dumps({name: round(value, 2) for name, value in row.items()}), flush=True)


def rank(folder: Path) -> None:
    """One process: load, connect, exchange, and leave when all are there."""
    from farpipe.engine.rendezvous import rendezvous_from_env
    from farpipe.engine.transport import TransportConfig, connect

    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sites = tuple("west" if other < world_size // 2 else "east" for other in range(world_size))
    loaded_s = time.time()
    config = TransportConfig(sites=sites, connect_timeout_s=300.0)
    with connect(number, world_size, config, rendezvous_from_env()) as transport:
        done_s = time.time()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory_mib = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        figures = {"loaded_s": loaded_s, "done_s": done_s, "memory_mib": memory_mib}
        (folder / f"{number}.json").write_text(json.dumps(figures))
        transport.exchange("end", b"", waiting_for="the end")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]))
    else:
        main([int(text) for text in sys.argv[1:]] or [*SIZES])
