"""Launchers by name: farpipe's own, and those of installed distributions (entry points ``farpipe.launchers``)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.core.plugins import Plugins
from farpipe.core.strict import nearest, validate
from farpipe.service.door import Door, Schedulers
from farpipe.service.launcher import Launcher
from farpipe.service.share import SiteRules
from farpipe.service.sites import Ask, SitesLauncher, Ssh

Tables = Mapping[str, Mapping[str, Any]]
"""Of every site of FLEET.toml its tables about launching, as they are written."""


class SiteTables(Schedulers):
    """How a site starts its share of an attempt."""

    launch: SiteRules = SiteRules()
    """[sites.launch]; behind ssh the site's own SITE.toml has it."""
    ssh: Ssh | None = None
    """[sites.ssh]; None: it is this machine."""

    def ask(self, site: str, root: Path) -> Ask:
        """How the site is asked; InputError where a table would count for nothing."""
        if self.ssh is None:
            schedulers = {name: getattr(self, name) for name in Schedulers.model_fields}
            return Door(site=site, root=root, rules=self.launch, **schedulers).answer
        if self.scheduler is not None or self.launch != SiteRules():
            raise InputError(f"site {site!r}: with [sites.ssh], its other tables belong into SITE.toml at the site")
        return self.ssh.ask


def at_sites(root: Path, tables: Tables) -> Launcher:
    """A share of every attempt at each of its sites."""
    read = {site: validate(SiteTables, dict(table), f"site {site!r}") for site, table in tables.items()}
    is_one_machine = all(table.ssh is None and table.scheduler is None for table in read.values())
    doors = {site: table.ask(site, root) for site, table in read.items()}
    return SitesLauncher(root, doors, emulates=is_one_machine)


LAUNCHERS: Final = Plugins("launcher", "farpipe.launchers", {"sites": at_sites}, callable)
"""Each is made from the root of all attempts' directories and the tables of all sites."""


def launcher_of(name: str, root: Path, tables: Tables) -> Launcher:
    """The launcher of that name; InputError where there is none."""
    make: Callable[[Path, Tables], Launcher] | None = LAUNCHERS.find(name)
    if make is None:
        raise InputError(f"launcher: {name!r} is not known{nearest(name, LAUNCHERS.known)}")
    return make(root, tables)
