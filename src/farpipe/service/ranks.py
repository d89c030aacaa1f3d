"""Run one machine's share of an attempt: ``python -m farpipe.service.ranks FOLDER SITE [NUMBER]``.

It waits until the service has seen the machines of all sites, so that none trains while another still queues. It leaves
at a checkpoint when it is told to, and when nobody has wanted it for a while: a site that is cut off from its service
does not go on for ever. ``end-SITE.json`` says how it ended, with the rank that failed first.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import FarpipeError, InputError, RunError, RunStoppedError
from farpipe.core.strict import parse_json, validate, write_text
from farpipe.engine.figures.follower import Follower
from farpipe.engine.figures.metrics import METRICS_NAME
from farpipe.engine.launch.launcher import RANK_PROGRAM, launch
from farpipe.engine.launch.run import LEAVE_S
from farpipe.engine.launch.world import World
from farpipe.engine.lock import RUN_SHA256_VARIABLE, digest_of
from farpipe.engine.processes import LeaveRequest, end_at_once, leave_request
from farpipe.service.folder import LOG_NAME, POLL_S, RUN_NAME, begins, stop_time
from farpipe.service.share import GO_NAME, SHARES_NAME, Share, Shares, SiteRules

BEAT_S: Final = 2.0


class Ranks(Share):
    """The ranks of a share, and what has to be there before they train."""

    def main(self) -> None:
        """Run the share, unless it has begun before."""
        if begins(self.path("lock"), self.path("begun")) is None:
            return
        end: dict[str, Any] = {"exit_code": 0, "why": ""}
        try:
            self._run()
        except FarpipeError as error:
            rank = error.failed_rank
            end = {"exit_code": error.exit_code, "why": str(error)}
            if rank is not None:
                name = signal.Signals(-rank.exit_code).name if rank.exit_code < 0 else None
                end |= {"rank": rank.rank, "signal": name, "is_victim": rank.is_victim}
            self._log(f"{self.site}: {error}")
        write_text(self.path("end", ".json"), json.dumps(end | {"site": self.site, "time_s": time.time()}) + "\n")

    def _run(self) -> None:
        shares = Shares.load(self.folder / SHARES_NAME)
        rules = validate(SiteRules, parse_json(self.rules_path.read_text(), str(self.rules_path)), "rules")
        host = _address() if rules.host == "auto" else rules.host
        with leave_request(end_at_once) as request:
            tick = partial(self._tick, request, rules.orphan_after_s)
            tick()
            if self.number == 0 and shares.resume is not None and rules.fetch is not None:
                self._fetch(shares, rules.fetch, tick, request)
            ranks = shares.sites[self.site][self.number]
            with _listener(host) if 0 in ranks else contextlib.nullcontext() as listener:
                address = listener.getsockname() if listener else (host, 0)
                write_text(self.path("ready", ".json"), json.dumps(address) + "\n")
                go = self._wait_for_go(tick, request)
                world = World(ranks, shares.num_processes, (go["host"], go["port"]), go["token"], listener)
                self._launch(world, host, rules, tick, request)

    def _launch(self, world: World, host: str, rules: SiteRules, tick: "partial[None]", request: LeaveRequest) -> None:
        run_dir = self.folder / RUN_NAME
        follower = Follower(run_dir / METRICS_NAME, self._log_step if 0 in world.ranks else None)
        security = ["--allow-plaintext"] if rules.certs is None else ["--certs", rules.certs]
        argv = [sys.executable, *RANK_PROGRAM, str(run_dir), "--host", host, *security]

        def tick_and_read() -> None:
            tick()
            follower.read()

        try:
            launch(
                lambda rank: argv,
                len(world.ranks),
                world=world,
                log_dir=run_dir / "logs",
                env={RUN_SHA256_VARIABLE: digest_of(run_dir)},
                on_tick=tick_and_read,
                request=request,
                leave_s=LEAVE_S,
            )
        finally:
            follower.read()

    def _log_step(self, line: dict[str, Any]) -> None:
        if line["step"] >= 1000 and line["step"] % 100:
            return  # the log stays within what is shown of it at once
        loss = "" if line.get("loss") is None else f"loss {line['loss']:.4g}, "
        self._log(f"step {line['step']}: {loss}{line.get('step_s', 0.0):.3g} s")

    def _log(self, text: str) -> None:
        with (self.folder / LOG_NAME).open("a") as log:
            log.write(text + "\n")

    def _tick(self, request: LeaveRequest, orphan_after_s: float) -> None:
        """Beat, and note when the share is to leave; RunError when it has not left in its time."""
        beat = self.path("beat")
        if not beat.exists() or time.time() > beat.stat().st_mtime + BEAT_S:
            beat.touch()
        # Both times are of the file system's clock, which may not be this machine's.
        is_orphan = beat.stat().st_mtime > self.wanted_path.stat().st_mtime + orphan_after_s
        leave_s = stop_time(self.stop_path)
        if request.time_s is None and (leave_s is not None or is_orphan):
            request.time_s = time.monotonic()
        if request.time_s is not None and leave_s is not None and time.monotonic() > request.time_s + leave_s:
            raise RunError(f"its ranks did not leave within {leave_s:g} s")

    def _wait_for_go(self, tick: "partial[None]", request: LeaveRequest) -> dict[str, Any]:
        path = self.folder / GO_NAME
        while not path.exists():
            tick()
            if request:
                raise RunStoppedError("stopped before the machines of all sites were there")
            time.sleep(POLL_S)
        found: dict[str, Any] = parse_json(path.read_text(), str(path))
        return found

    def _fetch(self, shares: Shares, command: str, tick: "partial[None]", request: LeaveRequest) -> None:
        """Bring the checkpoint from all sites that have a piece of it; RunError with the command's last words."""
        assert shares.resume is not None
        if not Path(shares.resume).is_relative_to(self.folder.parents[1]):
            raise InputError(f"{shares.resume}: is no checkpoint below {self.folder.parents[1]}")
        Path(shares.resume).mkdir(parents=True, exist_ok=True)
        for site in shares.old_sites:
            if site == self.site:
                continue
            env = os.environ | {"CHECKPOINT": shares.resume, "FROM_SITE": site, "TO_SITE": self.site}
            with self.path("log").open("ab") as log:
                child = subprocess.Popen(
                    ["bash", "-c", command], env=env, stdout=log, stderr=log, start_new_session=True
                )
            try:
                while child.poll() is None and not request:
                    tick()
                    time.sleep(POLL_S)
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            if request:
                raise RunStoppedError("stopped while its checkpoint was brought")
            if child.returncode:
                said = self.path("log").read_text(errors="replace")[-500:]
                raise RunError(
                    f"the command that brings the checkpoint from {site} ended with {child.returncode}: {said}"
                )


def _address() -> str:
    """First address of this machine."""
    words = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    if not words:
        raise InputError("this machine has no address but its loopback's; name one as the site's host")
    return words[0]


@contextlib.contextmanager
def _listener(host: str) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise InputError(f"host: {host} can't be listened on: {error.strerror}; name an address of the site") from None
    with listener:
        yield listener


if __name__ == "__main__":
    number = int(sys.argv[3] if len(sys.argv) > 3 else os.environ.get("SLURM_NODEID", "0"))
    Ranks(Path(sys.argv[1]).resolve(), sys.argv[2], number).main()
