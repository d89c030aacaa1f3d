"""Launchers: what starts the attempts of jobs, looks at them, stops them and reads their files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from farpipe.core.errors import InputError
from farpipe.core.strict import parse_json
from farpipe.fleet.events import Event
from farpipe.service.folder import END_NAME


class Key(NamedTuple):
    """One attempt of one job: begun at most once, whoever asks and however often."""

    job: str
    attempt: int


@dataclass(frozen=True)
class Seen:
    """What a launcher sees of an attempt."""

    state: Literal["absent", "alive", "ended", "vanished", "unknown"]
    """``absent``: it has not begun; ``vanished``: nothing of it runs, and it has not said how it ended; ``unknown``: a
    site of it does not answer."""
    exit_code: int | None = None
    """Of an attempt that has ended; negative: the signal that ended it."""
    why: str = ""
    """Last words of one that did not end well."""
    stored: tuple[int, ...] = ()
    """Steps of its checkpoints that are whole."""


def noted_end(folder: Path) -> Seen | None:
    """How an attempt has ended, by the file in its directory; None: it has not said so."""
    path = folder / END_NAME
    if not path.exists():
        return None
    try:
        end = parse_json(path.read_bytes().decode(), str(path))
        return Seen("ended", int(end["exit_code"]), str(end["why"]))
    except (InputError, KeyError, TypeError, ValueError):
        return Seen("ended", 1, f"{path} can't be read")


class Launcher(Protocol):
    """Starts attempts, each in a directory of its own that holds its order. What is done twice does nothing twice."""

    def start(self, key: Key, folder: Path, where: Mapping[str, int]) -> None:
        """Start the attempt whose order lies in `folder`, on so many devices by site."""

    def look(self, keys: Iterable[Key]) -> Mapping[Key, Seen]:
        """What is to be seen of each attempt."""

    def stop(self, key: Key, leave_s: float) -> None:
        """Have the attempt write a checkpoint and leave; what still runs after `leave_s` is killed.

        One that has not begun never does.
        """

    def site_events(self, up: Mapping[str, bool], now_s: float) -> Sequence[Event]:
        """Sites that have been silent for so long that they count as lost, and such that answer again.

        `up`: whether the fleet has them. One that somebody else has declared lost stays so.
        """

    def read(self, key: Key, file: str, offset: int) -> bytes:
        """What a file in the attempt's directory has from `offset` on; nothing where there is no such file."""
