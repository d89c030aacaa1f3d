"""A site's agent: ``python -m farpipe.engine.outer.agent RUN_DIR SITE``. It outlives the site's ranks. Needs no torch.

It starts the ranks of its site and starts them again when they are lost, tells the other sites' agents how far they
are, and is the place where the processes of a world to come meet.
"""

import contextlib
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from farpipe.core.errors import DivergedError, FarpipeError, RunError, RunInterruptedError, RunStoppedError
from farpipe.engine.checkpoint.folders import site_folder
from farpipe.engine.figures.metrics import RUN_NAME
from farpipe.engine.launch.directory import next_log_dir
from farpipe.engine.launch.launcher import RANK_PROGRAM, launch
from farpipe.engine.launch.reports import INTERRUPTED, report_done, reporting_errors
from farpipe.engine.lock import digest_of
from farpipe.engine.outer.calls import Caller, CallServer
from farpipe.engine.outer.environment import Agents, listener_from_env
from farpipe.engine.outer.meeting import BEHIND, NEAR_STEPS, Meeting, Offer, Status
from farpipe.engine.outer.sites import run_at
from farpipe.engine.processes import LeaveRequest, end_at_once, end_soon, leave_request
from farpipe.engine.run_spec import RunSpec

BEAT_S: Final = 0.25
"""Seconds between two messages to every other agent."""
SILENT_S: Final = 10.0
"""Silence of another site after which the agent's log says why it can't be asked."""
PAUSE_S: Final = 1.0
"""Seconds before the ranks are started again."""
MAX_FAILURES: Final = 5
"""Starts in a row, without a step between them, after which a site gives up."""
LEAVE_S: Final = 600.0
_KEPT_WORLDS: Final = 8


class Agent:
    """The meeting of one site, its server, and its beats."""

    def __init__(self, run_dir: Path, agents: Agents, listener: socket.socket) -> None:
        """`listener`: where it can be asked."""
        near_steps = math.inf if RunSpec.load(run_dir / RUN_NAME).local_steps else NEAR_STEPS
        self._agents = agents
        self.meeting = Meeting(agents.own, len(agents.sites), digest_of(run_dir), near_steps=near_steps)
        self._store: dict[str, dict[str, str]] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._server = CallServer(listener, agents.own, agents.sites, agents.token, agents.credentials, self.answer)
        for site in agents.others:
            threading.Thread(target=self._beat, args=(site,), name=f"farpipe beat {site}", daemon=True).start()

    def answer(self, source: int, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one question of a rank, or of another site's agent."""
        with self._lock:
            match question:
                case {"ask": "beat", "status": status}:
                    self.meeting.hear(source, Status.from_data(status), time.monotonic())
                    return {"status": self.meeting.own.to_data()}
                case {"ask": "offer", "offer": offer}:
                    self.meeting.take(Offer.from_data(offer))
                    return {}
                case {"ask": "report", "facts": facts, "failed": failed} if source == self._agents.own:
                    return self._report(facts, failed)
                case {"ask": "set", "world": world, "key": key, "value": value}:
                    self._keys(str(world))[str(key)] = str(value)
                    return {}
                case {"ask": "get", "world": world, "key": key}:
                    return {"value": self._keys(str(world)).get(str(key))}
        raise RunError("a question that can't be read; do all sites run the same farpipe?")

    def _report(self, facts: Mapping[str, Any], failed: str) -> dict[str, Any]:
        """What this site's ranks have to know, who say how far they are."""
        now_s = time.monotonic()
        self.meeting.ready(now_s)
        self.meeting.report(**{**facts, "members": tuple(facts.get("members", ()))})
        if failed:
            self.meeting.fail(failed)
        offer = self.meeting.offer
        return {
            "offer": None if offer is None else offer.to_data(),
            "behind": self.meeting.is_behind(now_s),
            "begin": self.meeting.may_begin(now_s),
            "reached": [*self.meeting.reached(now_s)],
        }

    def _keys(self, world: str) -> dict[str, str]:
        """What the processes of a world to come have put down; that of worlds long past is dropped."""
        if world not in self._store:
            for old in [*self._store][: 1 - _KEPT_WORLDS]:
                del self._store[old]
        return self._store.setdefault(world, {})

    def _beat(self, site: int) -> None:
        """Tell the agent of `site` how this one is, and offer worlds to it."""
        with contextlib.closing(self._agents.caller(site)) as caller:
            self._talk_to(site, caller)

    def _talk_to(self, site: int, caller: Caller) -> None:
        offered, said, heard_s = "", "", time.monotonic()
        while not self._ended.wait(BEAT_S):
            with self._lock:
                status = self.meeting.own.to_data()
            try:
                answer = caller.call({"ask": "beat", "status": status})
                with self._lock:
                    self.meeting.hear(site, Status.from_data(answer["status"]), time.monotonic())
                    self.meeting.propose(time.monotonic())
                    offer = self.meeting.offer
                is_ours = offer is not None and offer.giver == self._agents.own and site in offer.members
                if offer is not None and is_ours and offer.world != offered:
                    offered = offer.world
                    caller.call({"ask": "offer", "offer": offer.to_data()})
                heard_s = time.monotonic()
            except (OSError, RunError) as error:
                if isinstance(error, OSError) and time.monotonic() < heard_s + SILENT_S:
                    continue
                if str(error) != said:
                    print(f"site {self._agents.sites[self._agents.own]}: {error}", file=sys.stderr, flush=True)
                said = str(error)

    def ranks_ended(self) -> None:
        """The ranks are gone: nothing can be offered to this site until they are back."""
        with self._lock:
            self.meeting.report(step=-1, waiting=True, world="", members=())
            if self.meeting.offer is not None:
                self.meeting.fail(self.meeting.offer.world)

    def close(self) -> None:
        """End the beats and the server."""
        self._ended.set()
        self._server.close()


@contextlib.contextmanager
def running_agent(run_dir: Path, agents: Agents) -> Iterator[Agent]:
    """Context in which the agent of a site works in the background."""
    agent = Agent(run_dir, agents, listener_from_env(agents))
    try:
        yield agent
    finally:
        agent.close()


def keep_running(run_dir: Path, agents: Agents, program: Sequence[str], agent: Agent, request: LeaveRequest) -> None:
    """Run the site's ranks, each the Python `program`, until all steps are done; lost ones are started again.

    Raises what would only happen again: that the training diverges, wrong inputs, that it was asked to leave.
    RunError where the ranks are lost MAX_FAILURES times without a step between.
    """
    site = agents.sites[agents.own]
    inner, folder = run_at(RunSpec.load(run_dir / RUN_NAME), site), site_folder(run_dir, site)
    command = [sys.executable, *program]
    num_failures, furthest = 0, -1
    while True:
        try:
            launch(
                lambda rank: command,
                inner.num_processes,
                on_notice=lambda text: print(text, file=sys.stderr, flush=True),
                request=request,
                leave_s=LEAVE_S,
                log_dir=next_log_dir(folder),
                env=agents.environment(),
            )
            return
        except (DivergedError, RunStoppedError, RunInterruptedError):
            raise
        except RunError as error:
            if request:
                raise
            step, is_behind = agent.meeting.own.step, BEHIND in str(error)
            num_failures = 0 if step > furthest or is_behind else num_failures + 1
            furthest = max(furthest, step)
            if num_failures >= MAX_FAILURES:
                raise
            print(f"site {site}: its ranks are started again: {error}", file=sys.stderr, flush=True)
        finally:
            agent.ranks_ended()
        time.sleep(0.0 if is_behind else PAUSE_S)


def main(
    run_dir: Annotated[Path, typer.Argument(help="Directory with run.json.")],
    site: Annotated[str, typer.Argument(help="The site that this is the agent of.")],
    host: Annotated[str, typer.Option(help="Address of this machine to listen on.")] = "127.0.0.1",
    certs: Annotated[Path | None, typer.Option(help="This site's folder from `farpipe certs issue`.")] = None,
    allow_plaintext: Annotated[bool, typer.Option(help="The network is private: messages may go unencrypted.")] = False,
    rank_program: Annotated[list[str] | None, typer.Argument(help="What the ranks run, after --.")] = None,
) -> None:
    """Run one site of the elastic run in RUN_DIR, and see to it that it returns.

    Reads FARPIPE_AGENTS, the addresses of all sites' agents as NAME=HOST:PORT, separated by commas, and
    FARPIPE_SITES_TOKEN, the secret by which sites know each other.
    """
    program = [*(rank_program or RANK_PROGRAM), str(run_dir), "--host", host]
    program += ["--certs", str(certs)] if certs else []
    program += ["--allow-plaintext"] if allow_plaintext else []
    with leave_request(end_at_once) as request:
        exit_code = 1
        try:
            with reporting_errors():
                agents = Agents.from_env(site, host, certs, allow_plaintext=allow_plaintext)
                with running_agent(run_dir, agents) as agent:
                    keep_running(run_dir, agents, program, agent, request)
            exit_code = 0
        except FarpipeError as error:
            print(f"site {site}: {error}", file=sys.stderr, flush=True)
            exit_code = error.exit_code
        except KeyboardInterrupt:
            exit_code = INTERRUPTED
        finally:
            report_done(exit_code)
            end_soon(exit_code, lambda text: print(text, file=sys.stderr, flush=True))
    sys.exit(exit_code)


if __name__ == "__main__":
    typer.run(main)
