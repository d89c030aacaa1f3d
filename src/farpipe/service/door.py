"""What a site does for the service: start its shares of attempts, look at them, stop them and read their files.

Through ssh it is a forced command, ``python -m farpipe.service.door SITE.toml``, which reads one request on stdin and
writes its answer: all that the service can have done at a site is here, and no word of it is a command.
"""

import base64
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, Self

from pydantic import model_validator

from farpipe.core.document import Table
from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.strict import parse_json, parse_toml, read_text, validate, write_text
from farpipe.engine.figures.metrics import PLAN_NAME
from farpipe.engine.figures.metrics import RUN_NAME as RUN_FILE
from farpipe.service.folder import JOB_NAME, RUN_NAME, is_locked, read_in, spawn, stop_time, stored_in
from farpipe.service.kubernetes import Kubernetes
from farpipe.service.ray import Ray
from farpipe.service.share import BEAT_LIMIT_S, GO_NAME, SHARES_NAME, Share, SiteRules, State
from farpipe.service.slurm import Slurm

KEY: Final = re.compile(f"{JOB_NAME}/[0-9]{{1,9}}")
"""Job and attempt, as the folder below the root."""
FILES: Final = (SHARES_NAME, f"{RUN_NAME}/{PLAN_NAME}", f"{RUN_NAME}/{RUN_FILE}")
"""Files that the service gives to a site."""
SPAWN_S: Final = 20.0
"""Time after which a process that has not begun is started again."""


class Starter(Protocol):
    """Starts the machines of a site, and knows what is still to come of them."""

    def start(self, shares: list[Share], num_devices: int) -> None:
        """Start the processes of all machines; what has begun is left alone."""

    def states(self, shares: list[Share]) -> list[tuple[State, str]]:
        """State by what the starter alone knows, with its words, of shares at their first machines; or an error."""

    def kill(self, share: Share, *, only_waiting: bool) -> None:
        """End what has not begun, or whatever is left."""


class Processes:
    """One machine per site: this one."""

    def start(self, shares: list[Share], num_devices: int) -> None:
        """As `Starter.start`; InputError for more than one machine."""
        if len(shares) > 1:
            raise InputError(
                f"site {shares[0].site!r} needs {len(shares)} machines, and starts on one; see [sites.slurm]"
            )
        share = shares[0]
        with suppress(FileNotFoundError):
            if time.time() < share.path("out").stat().st_mtime + SPAWN_S:
                return
        spawn(["-m", "farpipe.service.ranks", str(share.folder), share.site], share.path("out"))

    def states(self, shares: list[Share]) -> list[tuple[State, str]]:
        """As `Starter.states`."""
        return [("absent", "") for _ in shares]

    def kill(self, share: Share, *, only_waiting: bool) -> None:
        """As `Starter.kill`: the ranks end with the process that holds the lock."""


class Schedulers(Table):
    """What starts a site's machines, one of the three; none: they are processes of this machine."""

    slurm: Slurm | None = None
    ray: Ray | None = None
    kubernetes: Kubernetes | None = None

    @property
    def scheduler(self) -> Starter | None:
        """The one that starts its machines; None: none of them does."""
        return self.slurm or self.ray or self.kubernetes

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if len(found := [name for name in Schedulers.model_fields if getattr(self, name) is not None]) > 1:
            raise ValueError(f"{' and '.join(found)}: one alone can start the machines of a site")
        return self


class Door(Schedulers):
    """A site, from inside: SITE.toml."""

    site: str
    root: Path
    """Attempts have their directories there, JOB/ATTEMPT: the same path at all sites and at the service."""
    rules: SiteRules = SiteRules()

    def answer(self, request: Mapping[str, Any]) -> Any:
        """The answer to one request of the service's; InputError for one that is none."""
        for key in request.get("keys", [request.get("key")]):
            if not isinstance(key, str) or not KEY.fullmatch(key):
                raise InputError(f"no key of an attempt: {key!r:.100}")
        match request:
            case {"do": "begin", "key": key, "files": files, "num_machines": int(number), "num_devices": int(devices)}:
                return self._begin(self.root / key, files, number, devices)
            case {"do": "go", "key": key, "go": go}:
                return _write_once(self.root / key / GO_NAME, json.dumps(go), private=True)
            case {"do": "look", "keys": keys, "num_machines": counts}:
                return self._look(keys, counts)
            case {"do": "stop", "key": key, "leave_s": leave_s}:
                return self._stop(self.root / key, float(leave_s))
            case {"do": "read", "key": key, "file": str(file), "offset": int(offset)}:
                return base64.b64encode(read_in(self.root / key, file, offset)).decode()
        raise InputError(f"no request: {request.get('do')!r:.40}")

    @property
    def _starter(self) -> Starter:
        return self.scheduler or Processes()

    def _begin(self, folder: Path, files: Mapping[str, str], num_machines: int, num_devices: int) -> None:
        first = Share(folder, self.site)
        if stop_time(first.stop_path) is not None:
            return
        (folder / RUN_NAME).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            _write_once(folder / name, files[name])
        _write_once(first.rules_path, json.dumps(self.rules.model_dump()))
        first.wanted_path.touch()
        shares = [Share(folder, self.site, number) for number in range(num_machines)]
        with _alone(first.path("starting")) as is_alone:
            if is_alone and not first.path("begun").exists():
                self._starter.start(shares, num_devices)

    def _look(self, keys: list[str], counts: list[int]) -> list[dict[str, Any]]:
        shares = [Share(self.root / key, self.site) for key in keys]
        try:
            known = self._starter.states(shares)
        except (FarpipeError, OSError) as error:
            known = [("unknown", str(error)) for _ in shares]
        return [self._one(share, count, *one) for share, count, one in zip(shares, counts, known, strict=True)]

    def _one(self, first: Share, num_machines: int, state: State, why: str) -> dict[str, Any]:
        """The site's share of one attempt."""
        shares = [Share(first.folder, self.site, number) for number in range(num_machines)]
        if first.folder.exists():
            first.wanted_path.touch()
        if any(self._is_alive(share, first.wanted_path) for share in shares):
            state = "alive"
        elif state not in ("queued", "alive") and any(share.path("begun").exists() for share in shares):
            state = "over"
        return {
            "state": state,
            "why": why,
            "ends": [_json(share.path("end", ".json")) for share in shares if share.path("end", ".json").exists()],
            "ready": [_json(share.path("ready", ".json")) for share in shares if share.path("ready", ".json").exists()],
            "stored": stored_in(first.folder),
        }

    def _is_alive(self, share: Share, wanted: Path) -> bool:
        """True if the share runs, perhaps on a machine whose locks are not seen here."""
        if is_locked(share.path("lock")):
            return True
        if self.scheduler is None or share.path("end", ".json").exists():
            return False
        with suppress(FileNotFoundError):
            return wanted.stat().st_mtime < share.path("beat").stat().st_mtime + BEAT_LIMIT_S
        return False

    def _stop(self, folder: Path, leave_s: float) -> None:
        share = Share(folder, self.site)
        folder.mkdir(parents=True, exist_ok=True)
        _write_once(share.stop_path, f"{leave_s:g}\n")
        share.wanted_path.touch()
        is_late = share.wanted_path.stat().st_mtime > share.stop_path.stat().st_mtime + 2 * leave_s
        self._starter.kill(share, only_waiting=not is_late)


def _write_once(path: Path, text: str, *, private: bool = False) -> None:
    if not path.exists():
        write_text(path, text, private=private)


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(), str(path))
    except (InputError, UnicodeDecodeError):
        return {"exit_code": 1, "why": f"{path} can't be read", "time_s": 0.0}


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """True inside if nobody else starts the same now."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def main(settings: Path) -> None:
    """Answer the request on stdin: a line of JSON with ``answer``, or with ``error``."""
    try:
        door = validate(Door, parse_toml(read_text(settings), str(settings)), str(settings))
        answer = {"answer": door.answer(parse_json(sys.stdin.read(), "the request"))}
    except (FarpipeError, OSError) as error:
        answer = {"error": str(error), "exit_code": getattr(error, "exit_code", 6)}
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
