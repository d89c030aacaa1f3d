"""``farpipe optical blocking``: how much of some traffic an optical network refuses."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farpipe.cli.options import AsJson, Given, refuse, settings, with_groups
from farpipe.cli.output import check_folder, log, print_json, status
from farpipe.core.errors import UsageError
from farpipe.core.strict import write_text

if TYPE_CHECKING:
    from farpipe.optical.network import Network as OpticalNetwork
    from farpipe.optical.settings import BlockingSettings

Network = Annotated[
    str, typer.Option(help="nsfnet, topohub:sndlib/NAME, gnpy:coronet-conus, or a file: CSV, JSON, XML, GraphML, GML.")
]
Policy = Annotated[
    str, typer.Option(help="ksp-ff, ff-ksp, sd-ff, best-fit, last-fit, min-cuts, congestion-aware, or cd.")
]


@dataclass(frozen=True)
class BlockingOptions:
    """A network with its spectrum and policy, and the traffic on it."""

    network: Network = "nsfnet"
    trace: Annotated[Path | None, typer.Option(help="Requests: CSV request,arrival_s,src,dst,gbit_s,holding_s.")] = None
    load: Annotated[
        float | None, typer.Option(min=1e-6, max=5e7, help="Instead of a trace: the load of Poisson traffic in Erlang.")
    ] = None
    paths: Annotated[Path | None, typer.Option(help="Candidate paths: CSV src,dst,order,nodes,km.")] = None
    policy: Policy = "ksp-ff"
    slots: Annotated[int, typer.Option(min=1, max=4096, help="Slots per fibre.")] = 100
    slot_ghz: Annotated[float, typer.Option(help="Width of a slot in GHz.")] = 12.5
    guard: Annotated[int, typer.Option(min=0, help="Guard slots beside every light path.")] = 1
    modulation: Annotated[str, typer.Option(help="deeprmsa, gnpy, 64qam, bpsk, or a CSV file reach_km,bit_s_hz.")] = (
        "deeprmsa"
    )
    given: Given = None
    events: Annotated[Path | None, typer.Option(help="Write every request of --trace with its light path as CSV.")] = (
        None
    )
    as_json: AsJson = False

    @cached_property
    def details(self) -> "BlockingSettings":
        """The settings that `--set` names."""
        from farpipe.optical.settings import BlockingSettings

        return settings(BlockingSettings, self.given)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `farpipe.optical.blocking`."""
        keys = ("load", "trace", "paths", "policy", "slots", "slot_ghz", "guard", "modulation")
        return {key: getattr(self, key) for key in keys} | self.details.model_dump(exclude_unset=True)


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
def blocking(options: BlockingOptions) -> None:
    """Blocking of an optical network, under a trace or random traffic."""
    _expect_one_source(options)
    check_folder(
        options.events, keeping=(options.trace, options.paths, Path(options.network), Path(options.modulation))
    )
    from farpipe import optical
    from farpipe.optical.traffic_outcome import request_rows

    net = net_called(options.network, shared=options.details.shared)
    with status("playing requests"):
        found = optical.blocking(net, **options.arguments)
    found = replace(found, setting=found.setting | {"network": options.network})
    if options.events is not None:
        write_text(options.events, "\n".join(request_rows(found.outcomes[0], found.paths)) + "\n")
    if options.as_json:
        print_json(found.to_data())
    else:
        typer.echo(found)


def _expect_one_source(options: BlockingOptions) -> None:
    if (options.trace is None) == (options.load is None):
        raise UsageError("give the traffic as --trace FILE or as --load ERLANG, one of them")
    named = options.details.model_fields_set
    if options.trace is None:
        refuse(["--events"] if options.events is not None else [], "needs --trace")
    else:
        of_poisson = [f"--set {name}" for name in ("seeds", "requests", "truncate", "rates") if name in named]
        refuse(of_poisson, "is for --load, not for a trace")
    if options.paths is not None:
        of_found = [f"--set {name}" for name in ("k", "by") if name in named]
        refuse(of_found, "is for paths that farpipe finds; leave out --paths")
