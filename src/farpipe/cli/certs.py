"""``farpipe certs init|issue``: a private authority and the certificates of the sites."""

from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import quote

import typer

from farpipe.core.errors import InputError

certs = typer.Typer(help="Make a private authority and the certificates of the sites.", no_args_is_help=True)

AUTHORITY_DAYS: Final = 3650
"""Days for which the authority of a cluster is valid."""


@certs.command("init")
def certs_init(
    folder: Annotated[Path, typer.Argument(help="Folder of the authority; its key should stay there.")],
) -> None:
    """Make the private authority of a cluster, valid for ten years.

    Needs the extra secure: pip install "farpipe[secure]". The ranks don't.
    """
    from farpipe.engine.transport.security.authority import init

    end = init(folder, AUTHORITY_DAYS)
    typer.echo(f"authority made in {folder}, valid until {_day(end)}; keep {folder / 'authority.key'} private")


@certs.command("issue")
def certs_issue(
    folder: Annotated[Path, typer.Argument(help="The authority's folder.")],
    site: Annotated[str, typer.Argument(help="The site's name, as in the cluster.")],
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Limit it to this host name or address; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=AUTHORITY_DAYS, help="Days for which it is valid.")] = 365,
) -> None:
    """Make or renew the certificate of one site.

    Writes the folder FOLDER/SITE, which is all that the site needs.
    """
    from farpipe.core.spec.part import site_name
    from farpipe.engine.transport.security.authority import issue

    try:
        site_name(site)
    except ValueError as error:
        raise InputError(str(error)) from None
    ips = [one for one in host or [] if _is_address(one)]
    hosts = [one for one in host or [] if one not in ips]
    end = issue(folder, site, hosts=hosts, ips=ips, days=days)
    place = folder / quote(site)
    typer.echo(
        f"certificate of {site} in {place}, valid until {_day(end)}; copy this folder to the site and start its "
        f"ranks with --certs; renew it by the same command"
    )


def _is_address(text: str) -> bool:
    try:
        return bool(ip_address(text))
    except ValueError:
        return False


def _day(moment: "datetime") -> str:
    return moment.strftime("%Y-%m-%d")
