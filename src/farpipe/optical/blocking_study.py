"""Blocking of an optical network from the names of its parts: ``blocking("nsfnet", load=250)``."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, InstanceOf

from farpipe.core.arguments import named_or
from farpipe.core.errors import UsageError
from farpipe.core.strict import validate
from farpipe.core.units import format_percent
from farpipe.optical.confidence import Interval
from farpipe.optical.modulation import Modulation, find_modulation
from farpipe.optical.network import Network
from farpipe.optical.network_files import find_network
from farpipe.optical.paths import PathTable, k_shortest, load_paths
from farpipe.optical.policies import AssignmentPolicy, find_policy
from farpipe.optical.settings import BlockingSettings, NetworkOrName
from farpipe.optical.spectrum import Grid
from farpipe.optical.traffic import MAX_REQUESTS, PoissonTraffic, Traffic, load_trace
from farpipe.optical.traffic_outcome import Blocking, TrafficOutcome, play_traffic, poisson_blocking


@dataclass(frozen=True, repr=False)
class BlockingResult:
    """Requests that a network accepted and refused; `print` shows them with the setting that they are of."""

    setting: dict[str, Any]
    """The arguments of `blocking` that it is of."""
    paths: PathTable
    """The candidate paths."""
    runs: Blocking
    """One outcome of a trace, or one per seed of random traffic."""

    @property
    def outcomes(self) -> tuple[TrafficOutcome, ...]:
        """What became of every request, of each run."""
        return self.runs.outcomes

    @property
    def is_random(self) -> bool:
        """True for random traffic, whose shares have 95 % intervals."""
        return "load" in self.setting

    @property
    def blocking_ratio(self) -> float:
        """Share of the requests that was refused; the mean of several runs."""
        return self.runs.blocking_ratio.mean if self.is_random else self.outcomes[0].blocking_ratio

    @property
    def bandwidth_blocking_ratio(self) -> float:
        """Share of the asked-for Gbit/s that was refused; the mean of several runs."""
        return self.runs.bandwidth_blocking_ratio.mean if self.is_random else self.outcomes[0].bandwidth_blocking_ratio

    def to_data(self) -> dict[str, Any]:
        """The counts, shares and setting as JSON data."""
        counts = {
            key: sum(getattr(outcome, key) for outcome in self.outcomes) for key in ("requests", "accepted", "blocked")
        }
        shares = {
            "blocking_ratio": self.blocking_ratio,
            "bandwidth_blocking_ratio": self.bandwidth_blocking_ratio,
        }
        of_runs: dict[str, Any] = {}
        if self.is_random:
            of_runs = {f"{name}_interval": _bounds(getattr(self.runs, name)) for name in shares}
            of_runs["seeds"] = [outcome.to_data() for outcome in self.outcomes]
        last = self.outcomes[-1]
        spectrum = {"moved": last.num_moved, "fragmentation": asdict(last.fragmentation)}
        return counts | shares | of_runs | spectrum | {"setting": self.setting}

    def __repr__(self) -> str:
        facts, at = self.to_data(), self.setting
        source = f"{at['load']:g} Erlang" if self.is_random else at["trace"]
        shared = "one spectrum for both directions, " * at["shared"] + "defragmenting, " * at["defragment"]
        lines = [
            f"{at['network']}, {at['slots']} slots of {at['slot_ghz']:g} GHz, guard {at['guard']}, {shared}modulation "
            f"{at['modulation']}, policy {at['policy']}, {source}",
            f"{facts['requests']} requests: {facts['accepted']} accepted, {facts['blocked']} blocked",
        ]
        for name, what in (("blocking_ratio", "requests"), ("bandwidth_blocking_ratio", "bandwidth")):
            bounds = facts.get(f"{name}_interval")
            shown = f" (95 %: {format_percent(bounds[0], 3)} to {format_percent(bounds[1], 3)})" if bounds else ""
            lines.append(f"blocked share of {what}: {format_percent(facts[name], 3)}{shown}")
        broken = facts["fragmentation"]
        lines.append(
            f"spectrum at the end: {format_percent(broken['used_share'])} used, {broken['num_blocks']:.1f} free blocks "
            f"per fibre, external fragmentation {broken['external']:.2f}, entropy {broken['entropy']:.2f}"
        )
        lines += [f"defragmentation moved {facts['moved']} light paths"] * bool(facts["moved"])
        return "\n".join(lines)


class _Asked(BlockingSettings):
    """All arguments of `blocking`, for their check."""

    network: NetworkOrName
    load: Annotated[float, Field(gt=0, le=MAX_REQUESTS)] | None
    trace: Path | None
    paths: Path | None
    policy: Annotated[str | InstanceOf[AssignmentPolicy], named_or(AssignmentPolicy, "a policy")]
    slots: Annotated[int, Field(strict=True)]
    slot_ghz: Annotated[float, Field(strict=True)]
    guard: Annotated[int, Field(strict=True)]
    modulation: Annotated[str | InstanceOf[Modulation], named_or(Modulation, "a modulation")]


def blocking(
    network: str | Network = "nsfnet",
    load: float | None = None,
    *,
    trace: Path | str | None = None,
    paths: Path | str | None = None,
    policy: str | AssignmentPolicy = "ksp-ff",
    slots: int = 100,
    slot_ghz: float = 12.5,
    guard: int = 1,
    modulation: str | Modulation = "deeprmsa",
    **rare: Any,
) -> BlockingResult:
    """Play traffic on a network and count what it refuses.

    The traffic is random, Poisson with `load` Erlang, or that of a file `trace`. `network`, `policy` and `modulation`
    are names, files or objects; `slots` per fibre are `slot_ghz` GHz wide, with `guard` slots beside every light path.
    `rare` are the fields of `BlockingSettings`, such as seeds=5 independent runs side by side, k=5 candidate paths,
    requests=10_000, rates="25-100", and shared=True where both directions of an edge have one spectrum.

    Raises InputError for values that can't be, files and names that don't exist and requests that can't fit,
    UsageError for settings that exclude each other.
    """
    if (trace is None) == (load is None):
        raise UsageError("give the traffic as a trace or as a load in Erlang, one of them")
    main: dict[str, Any] = {
        "network": network,
        "load": load,
        "trace": trace,
        "paths": paths,
        "policy": policy,
        "slots": slots,
    }
    main |= {"slot_ghz": slot_ghz, "guard": guard, "modulation": modulation}
    more = validate(_Asked, main | rare, "optical.blocking")
    net = find_network(network, shared=more.shared) if isinstance(network, str) else network
    rule = find_policy(policy) if isinstance(policy, str) else policy
    modes = find_modulation(modulation) if isinstance(modulation, str) else modulation
    grid = Grid(slots, slot_ghz, guard)
    traffic = None if trace is None else load_trace(trace, net)
    found = _candidates(net, traffic, paths, more, modes)
    setting = {
        "network": network if isinstance(network, str) else net.name,
        "slots": slots,
        "slot_ghz": slot_ghz,
        "guard": guard,
        "modulation": modulation if isinstance(modulation, str) else modes.name,
        "policy": rule.name,
        "shared": more.shared,
        "defragment": more.defragment,
    } | ({"load": load} if trace is None else {"trace": str(trace)})
    if traffic is not None:
        warm_up = more.warm_up or 0
        one = play_traffic(traffic, found, rule, grid, modes, warm_up=warm_up, defragment=more.defragment)
        return BlockingResult(setting, found, Blocking((one,)))
    low, high = more.low_and_high
    runs = poisson_blocking(
        PoissonTraffic(load or 0.0, low=low, high=high, truncate_at=more.truncate),
        found,
        rule,
        grid,
        modes,
        num_requests=more.requests,
        warm_up=3_000 if more.warm_up is None else more.warm_up,
        seeds=range(more.seeds),
        defragment=more.defragment,
    )
    return BlockingResult(setting, found, runs)


def _candidates(
    net: Network, traffic: Traffic | None, paths: Path | str | None, more: BlockingSettings, modes: Modulation
) -> PathTable:
    """Candidate paths of the traffic's pairs, of all pairs where it is random: those of a file, or the k best."""
    pairs = None if traffic is None else traffic.pairs
    if paths is None:
        return k_shortest(net, pairs, k=more.k, by=more.by, modulation=modes)
    found = load_paths(paths, net)
    if pairs is None:
        found.expect_all_pairs(str(paths))
    return found


def _bounds(interval: Interval) -> list[float]:
    return [max(0.0, interval.low), min(1.0, interval.high)]
