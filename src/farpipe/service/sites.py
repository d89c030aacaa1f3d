"""Launcher over sites: a share of every attempt at each of its sites, all started or none, here or through ssh."""

import base64
import json
import math
import secrets
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from farpipe.core.document import Table
from farpipe.core.errors import InputError, RunError
from farpipe.core.strict import parse_json, write_text
from farpipe.fleet.events import Event, SiteBack, SiteLost
from farpipe.service.door import FILES
from farpipe.service.folder import LOCK_NAME, LOG_NAME, SECRET_NAMES, STOP_NAME, is_locked, read_in, spawn, write_end
from farpipe.service.launcher import Key, Seen, noted_end
from farpipe.service.share import SHARES_NAME, Shares

SSH_S: Final = 30.0
"""Time for an answer of a site's."""
AGAIN_S: Final = 5.0
"""Time after which a silent site is asked again."""
LOST_AFTER_S: Final = 600.0
"""Silence after which a site counts as lost, with what runs there."""
IDLE_S: Final = 30.0
"""Interval in which a site where nothing runs is asked, to be known as silent or as back."""
PLAN_S: Final = 120.0
"""Time in which the process that plans has begun."""
TOKEN_NAME: Final = SECRET_NAMES[1]
PLANNED_NAME: Final = "planned"
Ask = Callable[[dict[str, Any]], Any]
"""Has a request answered at a site; RunError where it is silent, InputError where it refuses."""


class Ssh(Table):
    """[sites.ssh]: the way to a site whose account has `farpipe.service.door` as its forced command."""

    destination: str
    """As ssh takes it, such as ``farpipe@login.zurich``."""
    config: str | None = None
    """File with ssh's settings: key, known hosts, port."""

    def ask(self, request: dict[str, Any]) -> Any:
        """Have a request answered; the request goes through stdin, so that nobody sees its secrets."""
        own = ["-F", self.config] if self.config else []
        safe = ["BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=5", "ServerAliveInterval=5"]
        argv = ["ssh", *own, *(f"-o{option}" for option in safe), "-T", "--", self.destination, "farpipe"]
        try:
            done = subprocess.run(
                argv, input=json.dumps(request).encode(), capture_output=True, timeout=SSH_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"ssh {self.destination}: {error}") from None
        line = done.stdout.strip().rpartition(b"\n")[2].decode(errors="replace")  # a login may print a greeting
        if done.returncode or not line:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise RunError(f"ssh {self.destination}: {said or f'exit code {done.returncode}'}")
        return _answer(line, self.destination)


def _answer(line: str, source: str) -> Any:
    try:
        found = parse_json(line, source)
    except InputError as error:
        raise RunError(f"{source} talks nonsense: {error}") from None
    if isinstance(found, dict) and "answer" in found:
        return found["answer"]
    if isinstance(found, dict) and "error" in found:
        raise (InputError if found.get("exit_code") == 3 else RunError)(f"{source}: {found['error']}")
    raise RunError(f"{source} talks nonsense: {line[:100]}")


@dataclass
class SitesLauncher:
    """Attempts as shares at their sites. All that is known lies in directories: one that is made anew sees the same."""

    root: Path
    """Attempts have their directories there, JOB/ATTEMPT: the same path here and at all sites."""
    doors: Mapping[str, Ask]
    """How each site is asked."""
    emulates: bool = False
    """True where all sites are this machine, and the links between them are emulated."""
    lost_after_s: float = LOST_AFTER_S
    silent: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Sites that do not answer: since when, on the monotonic clock, and why."""
    _asked_s: dict[str, float] = field(default_factory=dict)

    def start(self, key: Key, folder: Path, where: Mapping[str, int]) -> None:
        """As `Launcher.start`: first it is planned, in a process beside; `look` goes on with what is planned."""
        if unknown := sorted({*where} - {*self.doors}):
            raise InputError(f"no launcher for site {unknown[0]!r}; it knows {', '.join(self.doors)}")
        if not (folder / PLANNED_NAME).exists():
            (folder / PLANNED_NAME).touch()
            spawn(
                ["-m", "farpipe.service.prepare", str(folder), *(["--emulate"] if self.emulates else [])],
                folder / "out",
            )

    def look(self, keys: Iterable[Key]) -> Mapping[Key, Seen]:
        """As `Launcher.look`. It also takes a start and a stop further, at sites that were silent before."""
        known = {key: self._shares(key) for key in keys}
        now_s = time.monotonic()
        idle = (site for site in self.doors if now_s > self._asked_s.get(site, -math.inf) + IDLE_S)
        at_site: dict[str, list[Key]] = {site: [] for site in (*self.silent, *idle) if site in self.doors}
        for key, shares in known.items():
            for site in shares.sites if shares else ():
                at_site.setdefault(site, []).append(key)
        with ThreadPoolExecutor(max(1, len(at_site))) as pool:
            answers = dict(
                zip(at_site, pool.map(lambda site: self._look_at(site, at_site[site], known), at_site), strict=True)
            )
        found = {}
        for key, shares in known.items():
            parts = {site: answers[site][key] for site in shares.sites} if shares else {}
            found[key] = self._seen(key, shares, parts)
        return found

    def stop(self, key: Key, leave_s: float) -> None:
        """As `Launcher.stop`."""
        folder = self._folder(key)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / STOP_NAME).exists():
            write_text(folder / STOP_NAME, f"{leave_s:g}\n")
        shares = self._shares(key)
        for site in shares.sites if shares else ():
            with suppress(RunError):
                self._ask(site, do="stop", key=_path(key), leave_s=leave_s)

    def read(self, key: Key, file: str, offset: int) -> bytes:
        """As `Launcher.read`, from the first site that has the file."""
        shares = self._shares(key)
        for site in shares.sites if shares else ():
            with suppress(RunError):
                answer = self._ask(site, do="read", key=_path(key), file=file, offset=offset)
                if data := base64.b64decode(answer):
                    return data
        return read_in(self._folder(key), file, offset)

    def site_events(self, up: Mapping[str, bool], now_s: float) -> list[Event]:
        """As `Launcher.site_events`; what was lost is remembered on the disk."""
        events = list[Event]()
        for site, is_up in up.items():
            mark, since = self.root / f".lost-{site}", self.silent.get(site)
            if is_up and since is not None and time.monotonic() > since[0] + self.lost_after_s:
                mark.touch()
                events.append(SiteLost(now_s, site))
            elif since is None and mark.exists():
                mark.unlink()
                events += [] if is_up else [SiteBack(now_s, site)]
        return events

    def _folder(self, key: Key) -> Path:
        return self.root / key.job / str(key.attempt)

    def _shares(self, key: Key) -> Shares | None:
        path = self._folder(key) / SHARES_NAME
        return Shares.load(path) if path.exists() else None

    def _ask(self, site: str, **request: Any) -> Any:
        """A site's answer; a silent one is asked every `AGAIN_S` only."""
        since = self.silent.get(site)
        if site not in self.doors:
            raise RunError(f"site {site} is no site of the fleet any more")
        if since is not None and time.monotonic() < self._asked_s[site] + AGAIN_S:
            raise RunError(since[1])
        self._asked_s[site] = time.monotonic()
        try:
            answer = self.doors[site](request)
        except (RunError, OSError) as error:
            self.silent.setdefault(site, (time.monotonic(), str(error)))
            raise RunError(f"site {site}: {error}") from None
        self.silent.pop(site, None)
        return answer

    def _look_at(self, site: str, keys: list[Key], known: Mapping[Key, Shares | None]) -> dict[Key, dict[str, Any]]:
        counts = [len(shares.sites[site]) for key in keys if (shares := known[key])]
        try:
            found = self._ask(site, do="look", keys=[_path(key) for key in keys], num_machines=counts)
            return {key: one | {} for key, one in zip(keys, found, strict=True)}
        except (RunError, InputError, TypeError, ValueError) as error:
            nothing = {"state": "unknown", "why": str(error), "ends": [], "ready": [], "stored": []}
            return dict.fromkeys(keys, nothing)

    def _seen(self, key: Key, shares: Shares | None, parts: Mapping[str, dict[str, Any]]) -> Seen:
        """What all shares together are."""
        folder = self._folder(key)
        states = {site: part["state"] for site, part in parts.items()}
        if shares is None:
            return self._unplanned(folder)
        is_stopped = (folder / STOP_NAME).exists()
        stored = tuple(sorted({step for part in parts.values() for step in part["stored"]}))
        if not is_stopped and not {"over", "unknown"} & {*states.values()}:
            return self._advance(key, shares, parts, stored)
        is_over = [site for site, state in states.items() if state == "over" or (is_stopped and state == "absent")]
        alive = [site for site, state in states.items() if state in ("alive", "queued")]
        ends = [end for part in parts.values() for end in part["ends"]]
        if alive:
            if any(end["exit_code"] for end in ends) or (is_over and not ends):
                self.stop(key, 10.0)  # all parts start, or none; and what has lost one need not wait for it
            return Seen("alive", stored=stored)
        if "unknown" in states.values():
            why = next(part["why"] for part in parts.values() if part["state"] == "unknown")
            return Seen("unknown", why=why, stored=stored)
        if "over" not in states.values():
            return noted_end(folder) or Seen("ended", 75, "stopped before it began", stored)
        return _end(ends, parts, stored)

    def _unplanned(self, folder: Path) -> Seen:
        """An attempt whose plan is not made, or can't be."""
        if is_locked(folder / LOCK_NAME) or (folder / SHARES_NAME).exists():  # or it was planned since
            return Seen("alive")
        if (end := noted_end(folder)) is not None:
            return end
        if not (folder / PLANNED_NAME).exists():
            return Seen("absent")
        if (folder / STOP_NAME).exists():
            return Seen("ended", 75, "stopped before it began")
        is_fresh = time.time() < (folder / PLANNED_NAME).stat().st_mtime + PLAN_S
        return Seen("alive" if is_fresh else "vanished")

    def _advance(self, key: Key, shares: Shares, parts: Mapping[str, Any], stored: tuple[int, ...]) -> Seen:
        """Begin what has not begun, and let the ranks go where all machines are ready."""
        ready = {site: part["ready"] for site, part in parts.items()}
        folder = self._folder(key)
        try:
            for site, part in parts.items():
                if part["state"] == "absent":
                    self._begin(key, shares, site)
                if part["state"] == "queued":
                    _log_once(folder / LOG_NAME, f"{site} waits: {part['why']}")
            if all(len(ready[site]) == len(machines) for site, machines in shares.sites.items()):
                self._go(key, folder, next(address for one in ready.values() for address in one if address[1]))
        except InputError as error:
            write_text(folder / STOP_NAME, "10\n")
            write_end(folder, 3, str(error))
            self.stop(key, 10.0)
        except RunError:
            pass  # at the next look
        return Seen("alive", stored=stored)

    def _begin(self, key: Key, shares: Shares, site: str) -> None:
        folder, machines = self._folder(key), shares.sites[site]
        files = {name: (folder / name).read_text() for name in FILES}
        size = max(map(len, machines))
        self._ask(site, do="begin", key=_path(key), files=files, num_machines=len(machines), num_devices=size)

    def _go(self, key: Key, folder: Path, address: list[Any]) -> None:
        if (folder / "gone").exists():
            return
        if not (folder / TOKEN_NAME).exists():
            write_text(folder / TOKEN_NAME, secrets.token_hex(32), private=True)
        go = {"host": address[0], "port": address[1], "token": (folder / TOKEN_NAME).read_text()}
        shares = self._shares(key)
        for site in shares.sites if shares else ():
            self._ask(site, do="go", key=_path(key), go=go)
        (folder / "gone").touch()


def _end(ends: list[dict[str, Any]], parts: Mapping[str, Any], stored: tuple[int, ...]) -> Seen:
    """The end of an attempt of which nothing runs: that of the rank that failed first, and not of its victims."""
    bad = [end for end in ends if end["exit_code"]]
    if bad:
        first = min(bad, key=lambda end: (end["exit_code"] == 75, bool(end.get("is_victim")), end["time_s"]))
        return Seen("ended", int(first["exit_code"]), f"{first.get('site', '?')}: {first['why']}", stored)
    if all(part["ends"] for part in parts.values()):
        return Seen("ended", 0, "", stored)
    return Seen(
        "vanished", why=" ".join(part["why"] for part in parts.values() if not part["ends"]).strip(), stored=stored
    )


def _log_once(path: Path, line: str) -> None:
    """Tell what every look sees the first time; nothing trains yet, so the log is short."""
    if not path.exists() or line not in path.read_text().splitlines():
        with path.open("a") as log:
            log.write(line + "\n")


def _path(key: Key) -> str:
    return f"{key.job}/{key.attempt}"
