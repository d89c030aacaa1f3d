"""Machines of a run, the processes that each runs, and the commands or Slurm scripts that start them with torchrun."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote

from farpipe.core.errors import InputError
from farpipe.core.strict import nearest, read_text

if TYPE_CHECKING:
    from farpipe.engine.run_spec import RunSpec

_PLACEHOLDER: Final = re.compile(r"[^A-Za-z0-9_]")
MASTER_PORT: Final = 29500
AGENT_PORT: Final = 29600
"""Port at which the sites of an elastic run talk to each other."""


@dataclass(frozen=True)
class Machine:
    """One machine of a run: one agent of torchrun."""

    site: str
    number: int
    """Number within its site, from 0."""
    num_processes: int
    address: str
    """Address at which the others reach it; a word to fill in if it is not known."""


def machines_of(
    spec: "RunSpec", devices_per_machine: Mapping[str, int], hosts: Mapping[str, list["Host"]] | None = None
) -> list[Machine]:
    """The machines of `spec`, divided site by site into machines with at most this number of devices, one per process.

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
        found = [one if number[one.site] else replace(one, address=one.address.removesuffix("_0")) for one in found]
    return found


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


def torchrun_commands(
    machines: Sequence[Machine], run_dir: Path, max_restarts: int, *, is_elastic: bool = False
) -> str:
    """One command per machine, in the order of the ranks; addresses that are not known are left to fill in.

    `is_elastic`: each site is a run of its own, with its own agents of torchrun.
    """
    lines = [
        "ready. Copy this directory and the site's folder of certs to the same paths at every machine, then start:"
    ]
    if is_elastic:
        lines.append(f"(FARPIPE_RUN_TOKEN is a secret, the same at all sites; sites talk at port {AGENT_PORT}.)")
    for world in [group.machines for group in by_site(machines)] if is_elastic else [machines]:
        for node_rank, machine in enumerate(world):
            words = (str(machine.num_processes), str(node_rank), machine.address)
            command = _command(world, machine.site, run_dir, max_restarts, *words)
            several = any(other.site == machine.site and other.number for other in machines)
            where = f"{machine.site}, machine {machine.number}" if several else machine.site
            if is_elastic:
                command.insert(0, f"FARPIPE_SITE={machine.site} FARPIPE_AGENTS={agents_of(machines)}")
            lines += ["", f"at {where}:", "", "    " + " \\\n        ".join(command)]
    return "\n".join([*lines, ""])


def agents_of(machines: Sequence[Machine]) -> str:
    """The value of FARPIPE_AGENTS for a run whose sites may leave: the first machine of every site."""
    return ",".join(f"{group.name}={group.machines[0].address}:{AGENT_PORT}" for group in by_site(machines))


def certificates_of(site: str) -> str:
    """Folder of a site's certificate, as `farpipe certs issue certs SITE` makes it; the same path at every machine."""
    return f"certs/{quote(site)}"


def _command(
    machines: Sequence[Machine],
    site: str,
    run_dir: Path,
    max_restarts: int,
    num_processes: str,
    node_rank: str,
    host: str,
    master: str = "",
) -> list[str]:
    """The lines of one command at `site`; words of a shell script may stand for what a machine finds out itself."""
    return [
        f"torchrun --nnodes {len(machines)} --nproc-per-node {num_processes} --node-rank {node_rank}",
        f"--max-restarts {max_restarts} --master-addr {master or machines[0].address} --master-port {MASTER_PORT}",
        f"-m farpipe.engine.launch.rank_main {run_dir} --host {host} --certs {certificates_of(site)}",
    ]


def sbatch_scripts(
    machines: Sequence[Machine], run_dir: Path, max_restarts: int, *, with_gpus: bool, is_elastic: bool = False
) -> dict[str, str]:
    """A Slurm script per site, by file name: one task per machine, each an agent of torchrun.

    Sites have Slurm clusters of their own, so each script is submitted at its site with MASTER_ADDR, the address of the
    first machine of the first site, in the environment. `is_elastic`: each site is a run of its own, and gets the
    address of its own first machine, and of all sites' in FARPIPE_AGENTS.
    """
    found = {}
    for group in by_site(machines):
        world, first_node = (group.machines, 0) if is_elastic else (machines, group.first_node)
        agents = _set_agents(machines, group.name) if is_elastic else []
        of_world = group._replace(first_node=first_node)
        found[f"{group.name}.sbatch"] = _sbatch(world, of_world, run_dir, max_restarts, with_gpus, agents)
    return found


def _set_agents(machines: Sequence[Machine], site: str) -> list[str]:
    """Lines of a shell script with what the ranks of an elastic run have to know of the other sites."""
    known = agents_of(machines)
    agents = (
        f': "${{FARPIPE_AGENTS:?set it to {known}}}"' if "ADDRESS_OF_" in known else f": ${{FARPIPE_AGENTS:={known}}}"
    )
    token = ': "${FARPIPE_RUN_TOKEN:?set it to a secret, the same at all sites}"'
    return [agents, token, f"export FARPIPE_AGENTS FARPIPE_RUN_TOKEN FARPIPE_SITE={site}"]


class Group(NamedTuple):
    """Machines that follow each other at one site, under a name of their own."""

    name: str
    machines: list[Machine]
    first_node: int
    """Number of its first machine among all."""


def by_site(machines: Sequence[Machine]) -> list[Group]:
    """The machines in groups of one site; a site that the pipeline visits again has its number behind its name."""
    groups: list[Group] = []
    for site, members in groupby(machines, key=lambda machine: machine.site):
        again = any(group.name == site for group in groups)
        first_node = sum(len(group.machines) for group in groups)
        groups.append(Group(f"{site}-{len(groups)}" if again else site, [*members], first_node))
    return groups


def script_of(
    machines: Sequence[Machine], group: Group, run_dir: Path, max_restarts: int, variable: str, host: str
) -> str:
    """The shell script of every machine of a group, whose number in the group is in `variable`.

    It starts beside the run directory, where its volume is mounted.
    """
    run_dir = run_dir.absolute()
    sizes = " ".join(str(machine.num_processes) for machine in group.machines)
    rank = f"$(({group.first_node} + {variable}))"
    site, size = group.machines[0].site, f"${{SIZES[${variable}]}}"
    command = _command(machines, site, run_dir, max_restarts, size, rank, host, "$MASTER_ADDR")
    return f"cd {run_dir.parent}\nSIZES=({sizes})\nexec " + " \\\n  ".join(command)


def _sbatch(
    machines: Sequence[Machine],
    group: Group,
    run_dir: Path,
    max_restarts: int,
    with_gpus: bool,
    agents: Sequence[str],
) -> str:
    sizes = [machine.num_processes for machine in group.machines]
    rank, host = f"$(({group.first_node} + SLURM_NODEID))", "$(hostname -I | cut -d' ' -f1)"
    site = group.machines[0].site
    command = _command(machines, site, run_dir, max_restarts, "$NUM_PROCESSES", rank, host, "$MASTER_ADDR")
    gpus = [f"#SBATCH --gpus-per-node={max(sizes)}"] if with_gpus else []
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=farpipe-{site}",
        f"#SBATCH --nodes={len(sizes)}",
        "#SBATCH --ntasks-per-node=1",
        *gpus,
        "#SBATCH --exclusive",
        "#SBATCH --open-mode=append",
        "# SIGTERM 3 minutes before the time limit: the ranks write a checkpoint and leave; submit again to go on",
        "#SBATCH --signal=TERM@180",
        "",
        _set_master(machines[0]),
        "export MASTER_ADDR",
        *agents,
        "srun --kill-on-bad-exit=1 bash -c '",
        f"  SIZES=({' '.join(map(str, sizes))})",
        "  NUM_PROCESSES=${SIZES[$SLURM_NODEID]}",
        "  exec " + " \\\n      ".join(line.replace("'", "'\\''") for line in command),
        "'",
        "",
    ]
    return "\n".join(lines)


def _set_master(first: Machine) -> str:
    """Line of a shell script that sets MASTER_ADDR, or asks for it where the first machine's address is not known."""
    if first.address.startswith("ADDRESS_OF_"):
        return f': "${{MASTER_ADDR:?set it to the address of the first machine at {first.site}}}"'
    return f": ${{MASTER_ADDR:={first.address}}}"
