"""``farpipe explore JOB.toml``: a page with dials for links and devices that plans while one turns them."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from farpipe.cli.options import JobKeys, job_with
from farpipe.core.errors import UsageError


def explore(
    job: Annotated[Path, typer.Argument(help="The job as a TOML file.")],
    given: JobKeys = None,
) -> None:
    """Open a page with dials for latency, bandwidth and devices that plans again while you turn them.

    Estimates come at once, the searched plan when the dials rest. The page is served to this machine alone, until
    Ctrl-C. `farpipe plan --html` writes one that needs no server.
    """
    read = job_with(job, given)
    if read.data.packing is not None:
        raise UsageError("explore is for sequences of one length: leave out data.packing")
    from farpipe.cli.explore_server import HOST, server_of  # here, as a wrong job needs none of it

    with server_of(read) as server:
        url = f"http://{HOST}:{server.server_port}/"
        typer.echo(f"{url}   (Ctrl-C ends it)")
        webbrowser.open(url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")
