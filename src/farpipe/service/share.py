"""One machine's share of an attempt: whose ranks, its files, and the rules of its site. Loads little."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from farpipe.core.document import Document, Table
from farpipe.core.strict import validate

State = Literal["absent", "queued", "alive", "over", "unknown"]
"""Of a site's share of an attempt, as the site sees it."""
SHARES_NAME: Final = "shares.json"
GO_NAME: Final = "go.json"
BEAT_LIMIT_S: Final = 20.0
"""Age of a beat beyond which a machine whose lock can't be seen from here counts as gone."""


class Shares(Document, Table):
    """The ranks of every machine of every site, as the plan has them."""

    FORMAT: ClassVar[str] = "farpipe/fleet-shares/1"

    sites: dict[str, tuple[tuple[int, ...], ...]]
    resume: str | None = None
    """Folder of the checkpoint that the attempt begins from."""
    old_sites: tuple[str, ...] = ()
    """Sites that have written that checkpoint."""

    def to_body(self) -> dict[str, Any]:
        """Body of the JSON file."""
        return self.model_dump(mode="json")

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> "Shares":
        """The inverse of `to_body`; InputError names the place of what is wrong."""
        return validate(cls, body, source)

    @property
    def num_processes(self) -> int:
        """Number of all ranks."""
        return sum(len(ranks) for machines in self.sites.values() for ranks in machines)


class SiteRules(Table):
    """What its operator decides about the shares at a site."""

    host: str = "127.0.0.1"
    """Address at which other sites reach its ranks; ``auto``: the first one of each machine."""
    certs: str | None = None
    """The site's folder from `farpipe certs issue`; None: messages are not encrypted."""
    orphan_after_s: float = 900.0
    """Time without the service after which a share leaves at a checkpoint."""
    fetch: str | None = None
    """Shell command that brings the checkpoint $CHECKPOINT from the site $FROM_SITE to the same path here; None: the
    sites share a store, or the run mirrors its checkpoints."""


@dataclass(frozen=True)
class Share:
    """A share, known by its folder and machine."""

    folder: Path
    site: str
    number: int = 0

    @property
    def name(self) -> str:
        """Of its machine."""
        return f"{self.site}.{self.number}" if self.number else self.site

    @property
    def label(self) -> str:
        """Name of its job in the site's scheduler, by which a lost answer does no harm."""
        return f"farpipe-{self.folder.parent.name}.{self.folder.name}.{self.name}"

    @property
    def digest(self) -> str:
        """Tells it from all others of one scheduler, those of another fleet among them."""
        return hashlib.sha256(f"{self.folder} {self.name}".encode()).hexdigest()[:10]

    def path(self, kind: str, suffix: str = "") -> Path:
        """A file of this machine's."""
        return self.folder / f"{kind}-{self.name}{suffix}"

    @property
    def stop_path(self) -> Path:
        """Written where the site is to leave, with the seconds that it has for it."""
        return self.folder / f"stop-{self.site}"

    @property
    def wanted_path(self) -> Path:
        """Touched by the service at every look."""
        return self.folder / f"wanted-{self.site}"

    @property
    def rules_path(self) -> Path:
        """With the site's `SiteRules`."""
        return self.folder / f"rules-{self.site}.json"
