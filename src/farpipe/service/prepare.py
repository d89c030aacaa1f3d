"""Plan an attempt, beside the service: ``python -m farpipe.service.prepare FOLDER [--emulate]``.

It makes the run's directory and says which ranks are whose; or how it ended, where there is no plan.
"""

import os
import sys
from pathlib import Path

from farpipe.core.errors import FarpipeError, InputError
from farpipe.engine.launch.directory import open_run_dir
from farpipe.engine.launch.machines import machines_of
from farpipe.engine.launch.runs import run_spec_of
from farpipe.engine.run_spec import RunSpec
from farpipe.service.folder import END_NAME, LOCK_NAME, LOG_NAME, RUN_NAME, take, write_end
from farpipe.service.order import ORDER_NAME, Order
from farpipe.service.share import SHARES_NAME, Shares


def main(folder: Path, *, emulate: bool) -> None:
    """Plan the attempt whose order lies in `folder`, unless that is done or somebody is at it."""
    lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        take(lock)
        if not (folder / SHARES_NAME).exists() and not (folder / END_NAME).exists():
            prepare(folder, emulate=emulate)
    except BlockingIOError:
        return
    except FarpipeError as error:
        write_end(folder, error.exit_code, str(error))


def prepare(folder: Path, *, emulate: bool) -> None:
    """Plan, and write what the sites need; InputError for a run that each site has to start by itself."""
    order = Order.load(folder / ORDER_NAME)
    placed = order.plan()
    if placed.warning:
        (folder / LOG_NAME).write_text(placed.warning + "\n")
    sizes = {site.name: site.devices_per_machine for site in placed.plan.job.cluster.sites}
    spec = run_spec_of(placed.plan, emulate_links=emulate, num_steps=order.num_steps, resume=order.resume)
    if spec.runs_by_site:
        raise InputError("training.elastic or local_steps: its sites start by themselves; a fleet can't run it yet")
    open_run_dir(spec, folder / RUN_NAME, resume=False)
    shares_of(spec, {} if emulate else sizes, order.resume).save(folder / SHARES_NAME)


def shares_of(spec: RunSpec, devices_per_machine: dict[str, int], resume: str | None) -> Shares:
    """The ranks of every machine of every site; the checkpoint's sites are those of the attempt that wrote it."""
    ranks, found = 0, dict[str, dict[int, list[int]]]()
    for machine in machines_of(spec, devices_per_machine):
        mine = found.setdefault(machine.site, {}).setdefault(machine.number, [])
        mine += range(ranks, ranks + machine.num_processes)
        ranks += machine.num_processes
    sites = {site: tuple(map(tuple, machines.values())) for site, machines in found.items()}
    old = Path(resume).parents[2] / SHARES_NAME if resume else None
    old_sites = tuple(Shares.load(old).sites) if old is not None and old.exists() else ()
    return Shares(sites=sites, resume=resume, old_sites=old_sites)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), emulate="--emulate" in sys.argv[2:])
