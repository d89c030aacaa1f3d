"""``farpipe probe``: measure the link between two machines, one of which listens."""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpipe.cli.options import AllowPlaintext, AsJson, refuse, typed, with_groups
from farpipe.cli.output import console, print_json, status
from farpipe.core.errors import InputError, UsageError
from farpipe.core.strict import nearest, read_text, write_text
from farpipe.core.units import BYTES, BYTES_PER_S, SECONDS, format_bytes, format_seconds, parse

if TYPE_CHECKING:
    from farpipe.engine.transport.link_probe import LinkFigures, Sides
    from farpipe.engine.transport.message_probe import Messages


@dataclass(frozen=True)
class ProbeOptions:
    """The other side, how to reach it, and where the link is written."""

    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="Address where the other side listens; with --listen, where this one does."
        ),
    ]
    link: Annotated[
        str | None, typer.Argument(help="With --write: 'a>b', the sites of this side and of the one that listens.")
    ] = None
    listen: Annotated[bool, typer.Option("--listen", help="Wait there for the other side, until Ctrl-C.")] = False
    certs: Annotated[Path | None, typer.Option(help="This site's folder from `farpipe certs issue`.")] = None
    allow_plaintext: AllowPlaintext = False
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FARPIPE_PROBE_TOKEN", help="Secret that the listening side shows when it has no certificates."
        ),
    ] = None
    seconds: Annotated[float, typer.Option(min=0.2, max=60.0, help="Length of each of the four measurements.")] = 3.0
    message: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[,PAUSE]",
            help="Measure single messages too: their size, and the pause before each (default 100 ms): '8 MB,100 ms'.",
        ),
    ] = None
    plan: Annotated[
        Path | None, typer.Option(help="Plan whose messages between sites, with their pauses, are measured as well.")
    ] = None
    write: Annotated[Path | None, typer.Option(help="Write the link into this cluster or job (.toml).")] = None
    as_json: AsJson = False


@with_groups
def probe(context: typer.Context, options: ProbeOptions) -> None:
    """Measure the link to another machine: round trip and rate, both directions.

    --token may also come from the environment, as FARPIPE_PROBE_TOKEN.
    """
    from farpipe.engine.transport.link_probe import measure

    write, (host, port) = options.write, _split(options.address)
    if (write is None) != (options.link is None):
        raise UsageError("--write and LINK go together: the file, and 'a>b' for the two sites in it")
    if options.listen:
        of_the_other_side = {"seconds": "--seconds", "write": "--write", "as_json": "--json"}
        of_the_other_side |= {name: f"--{name}" for name in ("message", "plan")}
        refuse(typed(context, **of_the_other_side), "is for the side that measures, not with --listen")
        _listen(host, port, options)
        return
    sides = _sides(host, options.certs, options.allow_plaintext, options.token)
    source, target = ("", "") if write is None else _ends(write, str(options.link))
    messages = _messages(options)
    with status(f"measuring the link to {host}, about {4 * options.seconds:.0f} s"):
        found = measure((host, port), sides, seconds=options.seconds, messages=messages)
    if write is not None:
        _write(write, source, target, found)
    for line in doubts(found):
        typer.echo(line, err=True)
    if options.as_json:
        print_json(found.to_data())
        return
    _show(found)
    if write is not None:
        typer.echo(f"links {source}>{target} and {target}>{source} written to {write}")


def _messages(options: ProbeOptions) -> "Messages | None":
    """Single messages to measure; UsageError where they are none, or given twice."""
    from farpipe.engine.transport.message_probe import MAX_MESSAGE_BYTES, Messages

    if options.message is None and options.plan is None:
        return None
    if options.message is not None and options.plan is not None:
        raise UsageError("--message and --plan: give one of the two, the plan has messages of its own")
    if options.plan is not None:
        from farpipe.planning.planner.plan import Plan

        asked = Messages.of(Plan.load(options.plan).problem)
        if asked is None:
            raise UsageError(f"--plan: in {options.plan} no site sends another one activations")
    else:
        size, _, pause = str(options.message).partition(",")
        try:
            asked = Messages(round(parse(size, BYTES, "8 MB")), parse(pause or "100 ms", SECONDS, "100 ms"))
        except ValueError as error:
            raise UsageError(f"--message: {error}") from None
    if not 0 < asked.num_bytes <= MAX_MESSAGE_BYTES:
        raise UsageError(f"messages of {asked.num_bytes:,} bytes can't be measured: from 1 to {MAX_MESSAGE_BYTES:,}")
    return asked


def doubts(found: "LinkFigures") -> Iterator[str]:
    """Sentence on each direction whose rates still contradict each other after all attempts."""
    from farpipe.engine.transport.link_probe import ATTEMPTS, LEAST_SHARE

    rates = {
        "there": (found.streams_there, found.one_stream_there),
        "back": (found.streams_back, found.one_stream_back),
    }
    for direction, (several, one) in rates.items():
        if several < LEAST_SHARE * one:
            yield (
                f"{direction}: {found.num_streams} streams got less than half of what one got alone, {ATTEMPTS} times; "
                "one stream's rate is taken. Measure again with more --seconds while neither machine does other work."
            )


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError(f"expected HOST:PORT, such as 10.0.0.2:29600, found {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _sides(host: str, certs: Path | None, allow_plaintext: bool, token: str | None) -> "Sides":
    """Keys with which the connection is secured; UsageError where neither certificates nor plaintext are named."""
    from farpipe.engine.transport.link_probe import Sides
    from farpipe.engine.transport.security.tls import TlsFiles

    if certs is not None:
        return Sides(TlsFiles.find(certs, ""), (token or "").encode())
    if not allow_plaintext and host not in ("127.0.0.1", "::1", "localhost"):
        raise UsageError(
            f"{host} is another machine's address: give this site's certificates with --certs (farpipe certs), or, on "
            "a private network, --allow-plaintext"
        )
    if not token:
        raise UsageError("without certificates, give the --token that the listening side shows")
    return Sides(None, token.encode())


def _listen(host: str, port: int, options: ProbeOptions) -> None:
    from farpipe.engine.transport.link_probe import ProbeServer

    token = options.token
    if options.certs is None and not token:
        token = secrets.token_hex(8)
        typer.echo(f"token: {token}", err=True)
    sides = _sides(host, options.certs, options.allow_plaintext, token)
    server = ProbeServer(host, port, sides, lambda text: typer.echo(text, err=True))
    typer.echo(f"listening on {host}:{server.port}; Ctrl-C to end", err=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        server.close()


def _ends(path: Path, link: str) -> tuple[str, str]:
    """The sites of `link`; an error, before anything is measured, when the file can't take a link between them."""
    from farpipe.core.spec import load_cluster

    source, arrow, target = link.partition(">")
    if not arrow or source == target:
        raise UsageError(f"LINK: expected two sites such as 'zurich>lugano', found {link!r}")
    known = [site.name for site in load_cluster(path).sites]
    for name in (source, target):
        if name not in known:
            raise InputError(f"LINK: {path} has no site {name!r}{nearest(name, known)}; it has {', '.join(known)}")
    return source, target


def _write(path: Path, source: str, target: str, found: "LinkFigures") -> None:
    """Put both directions into the file; the sites are there, see `_ends`."""
    from farpipe.core.spec import load_cluster
    from farpipe.core.spec.write import with_link

    latency_s, (there, back) = found.round_trip_s / 2, found.of_link
    text = with_link(read_text(path), source, target, latency_s, there)
    write_text(path, with_link(text, target, source, latency_s, back))
    load_cluster(path)


def _show(found: "LinkFigures") -> None:
    def rate(bytes_per_s: float) -> str:
        return f"{bytes_per_s / BYTES_PER_S['Mbit/s']:,.0f} Mbit/s"

    shown = console()
    shown.print(
        f"round trip      {format_seconds(found.round_trip_s)} (median {format_seconds(found.round_trip_median_s)})"
    )
    shown.print(f"one stream      {rate(found.one_stream_there)} there, {rate(found.one_stream_back)} back")
    shown.print(
        f"{f'{found.num_streams} streams':15} {rate(found.streams_there)} there, {rate(found.streams_back)} back"
    )
    if (single := found.messages) is None:
        return
    each = f"messages of {format_bytes(single.num_bytes)}, {format_seconds(single.gap_s)} apart"
    shown.print(f"{each}: {rate(single.there)} there, {rate(single.back)} back")
    if single.plain_there is None or single.plain_back is None:
        shown.print("  over plain TCP: the second port could not be reached")
    else:
        shown.print(f"  over plain TCP: {rate(single.plain_there)} there, {rate(single.plain_back)} back")
