"""Machines of a run and the processes that each runs, in the order of the processes' numbers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from farpipe.errors import InputError
from farpipe.strict import nearest, read_text

if TYPE_CHECKING:
    from farpipe.runtime.run_spec import RunSpec

_PLACEHOLDER: Final = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True)
class Machine:
    """One machine of a run: one agent of torchrun."""

    site: str
    number: int
    """Within its site, from 0."""
    num_processes: int
    address: str
    """Address at which the others reach it; a word to fill in if it is not known."""


def machines_of(
    spec: "RunSpec", devices_per_machine: Mapping[str, int], hosts: Mapping[str, list["Host"]] | None = None
) -> list[Machine]:
    """The machines of `spec`, which is divided site by site into machines of at most so many devices, one per process.

    A machine of a site that the pipeline visits twice may have two agents. `hosts`: the machines there are, by site;
    their slots count instead. InputError where they are too few.
    """
    sites = [spec.places.site(process) for process in range(spec.num_processes)]
    number, free = dict.fromkeys(sites, -1), dict.fromkeys(sites, 0)
    found: list[Machine] = []
    for site, processes in groupby(sites):
        left = len([*processes])
        while left:
            if not free[site]:
                number[site] += 1
                host = None if hosts is None else _host(hosts, site, number[site])
                free[site] = (host and host.slots) or devices_per_machine.get(site, spec.num_processes)
            address = f"ADDRESS_OF_{_PLACEHOLDER.sub('_', site)}_{number[site]}"
            size = min(left, free[site])
            found.append(Machine(site, number[site], size, hosts[site][number[site]].address if hosts else address))
            left, free[site] = left - size, free[site] - size
    if hosts is None:  # of a site with one machine the site's name is enough
        return [_plain(machine) if number[machine.site] == 0 else machine for machine in found]
    return found


def _plain(machine: Machine) -> Machine:
    return replace(machine, address=machine.address.removesuffix("_0"))


@dataclass(frozen=True)
class Host:
    """A line of a hostfile."""

    address: str
    slots: int | None
    """Processes that it takes; None: as many as the site's machines have devices."""


def read_hostfile(path: Path) -> dict[str, list[Host]]:
    """The machines of every site from lines ``ADDRESS site=NAME [slots=N]``; # begins a comment.

    InputError names the line that is wrong.
    """
    found: dict[str, list[Host]] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        address, *pairs = words
        fields = dict(pair.partition("=")[::2] for pair in pairs)
        place = f"{path}, line {number}"
        for key in fields.keys() - {"site", "slots"}:
            raise InputError(f"{place}: unknown word {key!r}{nearest(key, ['site', 'slots'])}")
        if not fields.get("site"):
            raise InputError(f"{place}: expected ADDRESS site=NAME [slots=N], found {line.strip()!r}")
        slots = fields.get("slots")
        if slots is not None and not (slots.isdecimal() and int(slots) > 0):
            raise InputError(f"{place}: slots: expected a number of processes, found {slots!r}")
        found.setdefault(fields["site"], []).append(Host(address, None if slots is None else int(slots)))
    return found


def hostfile(machines: list[Machine]) -> str:
    """A hostfile of these machines, for the addresses to be filled in."""
    lines = [f"{machine.address} site={machine.site} slots={machine.num_processes}" for machine in machines]
    return "\n".join(["# ADDRESS site=NAME slots=PROCESSES, in the order of the ranks", *lines, ""])


def _host(hosts: Mapping[str, list[Host]], site: str, number: int) -> Host:
    of_site = hosts.get(site, [])
    if number >= len(of_site):
        raise InputError(
            f"--hostfile: site {site!r} needs more than the {len(of_site)} machines that it names"
            f"{'' if of_site else nearest(site, hosts)}"
        )
    return of_site[number]
