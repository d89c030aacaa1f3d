"""``farpipe wan up|status|set|cut|mend|down``: a WAN of network namespaces on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from farpipe.cli.options import AsJson, pairs
from farpipe.cli.output import console, print_json
from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import nearest
from farpipe.core.units import BYTES_PER_S, SECONDS, format_bytes, format_rate, format_seconds, parse
from farpipe.report.tables import TableView, to_rich

if TYPE_CHECKING:
    from farpipe.core.spec import Cluster
    from farpipe.engine.links import Wan

wan = typer.Typer(help="Real kernel networking between emulated sites on this machine.", no_args_is_help=True)


@wan.callback()
def common(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="Name of the WAN, where there are several.")] = "default",
) -> None:
    """Real kernel networking between emulated sites on this machine."""
    context.obj = name


FIGURES: Final = {
    "latency": ("latency_s", SECONDS, "60 ms"),
    "bandwidth": ("bandwidth_bytes_per_s", BYTES_PER_S, "50 Mbit/s"),
    "jitter": ("jitter_s", SECONDS, "2 ms"),
    "loss": ("loss", {}, "0.01"),
}
"""Key, units and an example of what can be set of a link; a share has no units."""
LinkName = Annotated[str, typer.Argument(metavar="LINK", help="'a>b' for one direction, 'a<>b' for both, in quotes.")]


@wan.command("up")
def wan_up(
    context: typer.Context,
    cluster: Annotated[Path, typer.Argument(help="A job, or a file with a [cluster] alone (.toml).")],
) -> None:
    """Give every site of a cluster a network namespace, and every link its delay and rate.

    Needs root, /dev/net/tun and the command ip. The WAN stays until `farpipe wan down`.
    """
    from farpipe.core.spec import load_cluster
    from farpipe.engine.links import wan_of_cluster

    made = wan_of_cluster(load_cluster(cluster), name=context.obj, keep=True)
    for site, namespace in made.namespaces.items():
        typer.echo(f"{site}: {namespace.address}   {' '.join(namespace.command(['COMMAND']))}")


@wan.command("status")
def wan_status(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the sites and links of a WAN and what has passed."""
    found = _find(context.obj)
    status = found.status()
    if as_json:
        sites = {site: {"namespace": n.name, "address": n.address} for site, n in found.namespaces.items()}
        print_json({"name": context.obj, "sites": sites, **status})
        return
    for site, namespace in found.namespaces.items():
        typer.echo(f"{site}: {namespace.address} in namespace {namespace.name}")
    console().print(to_rich(_table(status["links"])))
    if not status["realtime"]:
        typer.echo("The forwarder has no real-time priority: delays grow when the cores are busy.")


@wan.command("set")
def wan_set(
    context: typer.Context,
    link: LinkName,
    figures: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...",
            help="'latency=60 ms' (one way), 'bandwidth=50 Mbit/s', 'jitter=2 ms' (largest delay of a packet), "
            "loss=0.01 (share of packets), as in the job.",
        ),
    ],
) -> None:
    """Change a link while it runs."""
    given = pairs(figures, "KEY=VALUE")
    if unknown := [key for key in given if key not in FIGURES]:
        raise UsageError(
            f"{unknown[0]}: a link has no such figure{nearest(unknown[0], FIGURES)}; it has {', '.join(FIGURES)}"
        )
    _find(context.obj).set(link, **{FIGURES[key][0]: _figure(key, text) for key, text in given.items()})


@wan.command("cut")
def wan_cut(context: typer.Context, link: LinkName) -> None:
    """Cut a link: nothing passes."""
    _find(context.obj).cut(link)


@wan.command("mend")
def wan_mend(context: typer.Context, link: LinkName) -> None:
    """Restore a link that was cut."""
    _find(context.obj).mend(link)


@wan.command("down")
def wan_down(context: typer.Context) -> None:
    """Remove a WAN, or what a crash left of it; no error if there is none."""
    from farpipe.engine.links import state
    from farpipe.engine.links.namespace import check_possible

    check_possible()
    try:
        state.check_name(context.obj)
    except ValueError as error:
        raise UsageError(f"--name: {error}") from None
    for pid in state.take_down(context.obj):
        typer.echo(f"process {pid} was in the WAN and continues without a network", err=True)


@contextmanager
def wan_for(cluster: "Cluster", *, wanted: bool) -> Iterator["Wan | None"]:
    """The WAN that a run over `cluster` uses: the one that is up, or one of its own, which is gone afterwards."""
    from farpipe.engine.links import Wan, wan_of_cluster
    from farpipe.engine.links.namespace import check_possible

    if not wanted:
        yield None
        return
    check_possible()
    if (found := Wan.find()) is not None:
        typer.echo(f"over the WAN {found.name!r}, which is up, with its links as set there", err=True)
        yield found
        return
    with wan_of_cluster(cluster, name=f"run{os.getpid()}") as own:
        yield own


def _find(name: str) -> "Wan":
    from farpipe.engine.links import Wan, state
    from farpipe.engine.links.namespace import check_possible

    check_possible()
    found = Wan.find(name)
    if found is None:
        known = ", ".join(state.names())
        others = f"; there are: {known}" if known else ""
        raise InputError(f"there is no WAN called {name!r}{others}; bring one up with `farpipe wan up`")
    return found


def _figure(key: str, text: str) -> float:
    _, units, example = FIGURES[key]
    try:
        return parse(text, units, example) if units else float(text)
    except ValueError as error:
        raise InputError(f"{key}: {error}") from None


def _table(links: dict[str, dict[str, Any]]) -> "TableView":
    columns = ("link", "latency", "bandwidth", "jitter", "loss", "delivered", "packets", "dropped", "queue", "of")
    rows = tuple(_row(name, link) for name, link in links.items())
    return TableView("Links", columns, rows, frozenset(range(1, len(columns))))


def _row(name: str, link: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{name} (cut)" if link["cut"] else name,
        format_seconds(link["latency_s"]),
        format_rate(link["bandwidth_bytes_per_s"]),
        format_seconds(link["jitter_s"]),
        f"{link['loss']:.3g}",
        format_bytes(link["bytes"]),
        f"{link['packets']:,}",
        f"{sum(link[kind] for kind in ('dropped_full', 'dropped_lost', 'dropped_cut')):,}",
        format_bytes(link["queued_bytes"]),
        format_bytes(link["queue_limit_bytes"]),
    )
