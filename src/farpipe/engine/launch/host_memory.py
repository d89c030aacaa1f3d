"""Check that this machine, or the container around this process, has memory for what all ranks hold for certain."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from farpipe.core.errors import InfeasibleError
from farpipe.core.units import format_bytes
from farpipe.engine.message_room import page_locked_bytes

if TYPE_CHECKING:
    from farpipe.engine.run_spec import RunSpec

MEMINFO: Final = Path("/proc/meminfo")
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_CGROUP: Final = Path("/proc/self/cgroup")
_LIMIT_FILES: Final = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use of memory under cgroup v2 and v1; see cgroups(7) and the kernel's cgroup-v2.rst."""


def expect_memory(spec: "RunSpec") -> None:
    """InfeasibleError when what all ranks hold for certain is more than is free here."""
    if spec.device == "cuda":  # GPUs have memory of their own for all else
        what, needed_bytes = "page-locked memory for messages", float(page_locked_bytes(spec))
        change = "make microbatches smaller, or start these ranks on several machines"
    elif spec.device == "sleep":
        what, needed_bytes = "the gradients that replicas exchange", _least_exchanged_bytes(spec)
        change = "rehearse a plan with fewer replicas, or a smaller model"
    else:
        what = "weights, gradients and optimizers"
        needed_bytes = spec.num_replicas * spec.num_twins * sum(rank.static_bytes for rank in spec.plan.problem.ranks)
        change = (
            "train a smaller model, rehearse this one with --device sleep, or let `farpipe prepare` write what "
            "torchrun needs to start it at its sites"
        )
    free = free_memory()
    if free is not None and needed_bytes > free[0]:
        raise InfeasibleError(
            f"all {spec.num_processes} ranks on this machine: {what} take {format_bytes(needed_bytes)}, and "
            f"{format_bytes(free[0])} are free{free[1]}; {change}"
        )


def free_memory() -> tuple[int, str] | None:
    """(bytes free for this process, where that is said); None where nothing says it."""
    return min([*_free_of_machine(), *_free_of_cgroups()], default=None)


def _free_of_machine() -> list[tuple[int, str]]:
    """(bytes free, where that is said), as [] or [one]."""
    if not MEMINFO.exists():
        return []
    lines = [line.split() for line in MEMINFO.read_text().splitlines()]
    return [(int(words[1]) * 1024, "") for words in lines if words[0] == "MemAvailable:"]


def _free_of_cgroups() -> list[tuple[int, str]]:
    """(bytes free, where that is said) of every control group around this process that has a limit."""
    found = []
    for folder in _cgroup_folders():
        for limit_name, use_name in _LIMIT_FILES:
            limit, use = _number(folder / limit_name), _number(folder / use_name)
            if limit is not None and use is not None:
                reclaimable = _reclaimable_bytes(folder / "memory.stat")
                found.append((max(0, limit - use + reclaimable), f" under the limit in {folder / limit_name}"))
    return found


def _cgroup_folders() -> list[Path]:
    """This process's control group and those around it, of v2 and of v1's memory controller."""
    folders: list[Path] = []
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            own = root / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return folders


def _number(path: Path) -> int | None:
    """Number that a file holds; None for "max" and for no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable_bytes(path: Path) -> int:
    """Page cache that the kernel gives up first; it counts as used."""
    try:
        words = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(words.get(name, 0)) for name in ("inactive_file", "active_file"))


def _least_exchanged_bytes(spec: "RunSpec") -> float:
    """Lower bound of what a rehearsal's collectives hold: a ring sends a tensor once or twice, each process has one."""
    if spec.num_replicas == 1:
        return 0.0
    return spec.num_replicas * float(spec.plan.problem.traffic.collectives.bytes.sum()) / 2
