"""``farpipe optical blocking``: how much of some traffic an optical network refuses."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.options import AsJson, Given, refuse, settings, typed, with_groups
from farpipe.cli.output import check_folder, log, print_json, status
from farpipe.core.errors import UsageError
from farpipe.core.strict import write_text
from farpipe.core.units import format_percent

if TYPE_CHECKING:
    from farpipe import optical
    from farpipe.cli.light_settings import BlockingSettings
    from farpipe.optical.blocking import Blocking, TrafficOutcome
    from farpipe.optical.confidence import Interval
    from farpipe.optical.modulation import Modulation as ModulationTable
    from farpipe.optical.network import Network as OpticalNetwork
    from farpipe.optical.paths import Pair, PathTable
    from farpipe.optical.policies import AssignmentPolicy

Network = Annotated[
    str, typer.Option(help="nsfnet, topohub:sndlib/NAME, gnpy:coronet-conus, or a file: CSV, JSON, XML, GraphML, GML.")
]
Policy = Annotated[
    str, typer.Option(help="ksp-ff, ff-ksp, sd-ff, best-fit, last-fit, min-cuts, congestion-aware, or cd.")
]
PathsFile = Annotated[Path | None, typer.Option(help="Candidate paths: CSV src,dst,order,nodes,km.")]
Slots = Annotated[int, typer.Option(min=1, help="Slots per fibre.")]
SlotGhz = Annotated[float, typer.Option(help="Width of a slot in GHz.")]
Guard = Annotated[int, typer.Option(min=0, help="Guard slots beside every light path.")]
Modulation = Annotated[str, typer.Option(help="deeprmsa, gnpy, 64qam, bpsk, or a CSV file reach_km,bit_s_hz.")]
Shared = Annotated[bool, typer.Option("--shared", help="Both directions of an edge share one spectrum.")]
Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Independent runs of random traffic, side by side.")]


@dataclass(frozen=True)
class BlockingOptions:
    """A network with its spectrum and policy, and the traffic on it."""

    network: Network = "nsfnet"
    trace: Annotated[Path | None, typer.Option(help="Requests: CSV request,arrival_s,src,dst,gbit_s,holding_s.")] = None
    load: Annotated[float | None, typer.Option(help="Instead of a trace: Poisson traffic of so many Erlang.")] = None
    paths: PathsFile = None
    policy: Policy = "ksp-ff"
    slots: Slots = 100
    slot_ghz: SlotGhz = 12.5
    guard: Guard = 1
    modulation: Modulation = "deeprmsa"
    shared: Shared = False
    seeds: Seeds = 5
    defragment: Annotated[
        bool, typer.Option("--defragment", help="Move light paths to lower slots when a request does not fit.")
    ] = False
    given: Given = None
    log: Annotated[Path | None, typer.Option(help="Of a trace: write every request and its light path as CSV.")] = None
    as_json: AsJson = False

    @cached_property
    def details(self) -> "BlockingSettings":
        """The settings that `--set` names."""
        from farpipe.cli.light_settings import BlockingSettings

        return settings(BlockingSettings, self.given)

    @cached_property
    def net(self) -> "OpticalNetwork":
        """The network."""
        return net_called(self.network, shared=self.shared)

    @cached_property
    def setting(self) -> "tuple[AssignmentPolicy, optical.Grid, ModulationTable]":
        """Policy, grid and modulation by which requests are assigned."""
        from farpipe.optical import Grid, find_modulation, find_policy

        grid = Grid(self.slots, self.slot_ghz, self.guard)
        return find_policy(self.policy), grid, find_modulation(self.modulation)

    @property
    def setting_facts(self) -> dict[str, Any]:
        """The setting that a result is of, by the names of the options."""
        keys = ("network", "slots", "slot_ghz", "guard", "modulation", "policy", "shared", "defragment")
        source = {"load": self.load} if self.trace is None else {"trace": str(self.trace)}
        return {key: getattr(self, key) for key in keys} | source

    def candidates(self, pairs: "Sequence[Pair] | None" = None) -> "PathTable":
        """The candidates of `pairs`: those of the file, or the k best."""
        from farpipe.optical import k_shortest, load_paths

        if self.paths is not None:
            found = load_paths(self.paths, self.net)
            if pairs is None:
                found.expect_all_pairs(str(self.paths))
            return found
        with status("finding paths"):
            return k_shortest(self.net, pairs, k=self.details.k, by=self.details.by, modulation=self.setting[2])


def net_called(name: str, *, shared: bool) -> "OpticalNetwork":
    """The network called `name`; lines on stderr name nodes that it lacks and lengths that can't be."""
    from farpipe.optical import find_network

    found = find_network(name, shared=shared)
    if found.left_out:
        log(f"{name}: without {', '.join(found.left_out)}: neither lengths nor positions say how far they are")
    if found.doubt:
        log(f"{name}: {found.doubt}")
    return found


@with_groups
def blocking(context: typer.Context, options: BlockingOptions) -> None:
    """Requests that an optical network refuses, from a trace or under random traffic."""
    _expect_one_source(context, options)
    check_folder(options.log, keeping=(options.trace, options.paths, Path(options.network), Path(options.modulation)))
    facts = _poisson_facts(options) if options.trace is None else _trace_facts(options, options.trace)
    _show(facts | {"setting": options.setting_facts}, options.as_json)


def _expect_one_source(context: typer.Context, options: BlockingOptions) -> None:
    if (options.trace is None) == (options.load is None):
        raise UsageError("give the traffic as --trace FILE or as --load ERLANG, one of them")
    named = options.details.model_fields_set
    if options.trace is None:
        refuse(["--log"] if options.log is not None else [], "is of the requests of --trace: give that too")
    else:
        of_poisson = [f"--set {name}" for name in ("requests", "truncate", "rates") if name in named]
        refuse(typed(context, seeds="--seeds") + of_poisson, "is for --load, not for a trace")
    if options.paths is not None:
        of_found = [f"--set {name}" for name in ("k", "by") if name in named]
        refuse(of_found, "is for paths that farpipe finds; --paths gives them")


def _trace_facts(options: BlockingOptions, trace: Path) -> dict[str, Any]:
    from farpipe.optical import load_trace, play_traffic
    from farpipe.optical.blocking import request_rows

    traffic = load_trace(trace, options.net)
    candidates = options.candidates(traffic.pairs)
    outcome = play_traffic(
        traffic,
        candidates,
        *options.setting,
        warm_up=options.details.warm_up or 0,
        defragment=options.defragment,
    )
    if options.log is not None:
        write_text(options.log, "\n".join(request_rows(outcome, candidates)) + "\n")
    return outcome.to_data() | _broken_up(outcome)


def _broken_up(outcome: "TrafficOutcome") -> dict[str, Any]:
    return {"moved": outcome.num_moved, "fragmentation": asdict(outcome.fragmentation)}


def _poisson_facts(options: BlockingOptions) -> dict[str, Any]:
    from farpipe.optical import PoissonTraffic, poisson_blocking

    details = options.details
    low, high = details.low_and_high
    found: Blocking = poisson_blocking(
        PoissonTraffic(options.load or 0.0, low=low, high=high, truncate_at=details.truncate),
        options.candidates(),
        *options.setting,
        num_requests=details.requests,
        warm_up=3_000 if details.warm_up is None else details.warm_up,
        seeds=range(options.seeds),
        defragment=options.defragment,
    )
    by_request, by_bandwidth = found.blocking_ratio, found.bandwidth_blocking_ratio
    return {
        "requests": sum(outcome.requests for outcome in found.outcomes),
        "accepted": sum(outcome.accepted for outcome in found.outcomes),
        "blocked": sum(outcome.blocked for outcome in found.outcomes),
        "blocking_ratio": by_request.mean,
        "bandwidth_blocking_ratio": by_bandwidth.mean,
        "blocking_ratio_interval": _bounds(by_request),
        "bandwidth_blocking_ratio_interval": _bounds(by_bandwidth),
        "seeds": [outcome.to_data() for outcome in found.outcomes],
        **_broken_up(found.outcomes[-1]),
    }


def _bounds(interval: "Interval") -> list[float]:
    return [max(0.0, interval.low), min(1.0, interval.high)]


def _show(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    at = facts["setting"]
    source = f"{at['load']:g} Erlang" if "load" in at else at["trace"]
    spectrum = "one spectrum for both directions, " * at["shared"] + "defragmenting, " * at["defragment"]
    typer.echo(
        f"{at['network']}, {at['slots']} slots of {at['slot_ghz']:g} GHz, guard {at['guard']}, {spectrum}modulation "
        f"{at['modulation']}, policy {at['policy']}, {source}"
    )
    typer.echo(f"{facts['requests']} requests: {facts['accepted']} accepted, {facts['blocked']} blocked")
    for name, what in (("blocking_ratio", "requests"), ("bandwidth_blocking_ratio", "bandwidth")):
        bounds = facts.get(f"{name}_interval")
        shown = f" (95 %: {format_percent(bounds[0], 3)} to {format_percent(bounds[1], 3)})" if bounds else ""
        typer.echo(f"blocked share of {what}: {format_percent(facts[name], 3)}{shown}")
    broken = facts["fragmentation"]
    typer.echo(
        f"spectrum at the end: {format_percent(broken['used_share'])} used, {broken['num_blocks']:.1f} free blocks per "
        f"fibre, external fragmentation {broken['external']:.2f}, entropy {broken['entropy']:.2f}"
    )
    if facts["moved"]:
        typer.echo(f"defragmentation moved {facts['moved']} light paths")
