"""Which reports are merged together where a quorum of the sites is enough: the first site of a world decides.

A report is a site's difference of one fragment. A round is decided `grace_s` after a quorum of sites has sent reports
that are in no round yet, with all that have come until then, at once where none is missing; late ones are part of the
next round. Every site merges the same rounds in the same order, each when its own time has come: so all have the same
anchor. If the first site is lost the world breaks, as with any other, and the next world has another first site.
"""

import json
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from farpipe.core.errors import RunError
from farpipe.core.spec import LocalSteps
from farpipe.engine.executor.peers import Peers

REPORTS: Final = "reports"
ROUNDS: Final = "rounds"
"""Boxes of the first site's first process, and of every site's."""
POLL_S: Final = 0.002


class Report(NamedTuple):
    """One site's difference of a fragment."""

    site: int
    number: int
    """Of the differences that the site has sent in its world."""
    tokens: float
    """By which it counts."""


class Round(NamedTuple):
    """What is merged together, in the order of the sites."""

    fragment: int
    reports: tuple[Report, ...]


class Deciding:
    """The decisions; pure. Times are monotonic seconds."""

    def __init__(self, settings: LocalSteps, num_sites: int) -> None:
        self._quorum, self._grace_s = settings.quorum or num_sites, settings.grace_s
        self._at_work = set(range(num_sites))
        self._open: dict[int, list[Report]] = {fragment: [] for fragment in range(settings.fragments)}
        self._since_s: dict[int, float] = {}
        """Times since when fragments have had a quorum."""

    def take(self, fragment: int, report: Report) -> None:
        """A report has been sent."""
        self._open[fragment].append(report)

    def finish(self, site: int) -> None:
        """A site has sent its last reports: the others no longer need it for a quorum."""
        self._at_work.discard(site)

    @property
    def is_over(self) -> bool:
        """True if all have finished, and every report is in a round."""
        return not self._at_work and not any(self._open.values())

    def decide(self, now_s: float) -> list[Round]:
        """The rounds that can be closed now."""
        return [round_ for fragment in self._open if (round_ := self._close(fragment, now_s)) is not None]

    def _close(self, fragment: int, now_s: float) -> Round | None:
        reports = sorted(self._open[fragment])
        there = self._at_work & {report.site for report in reports}
        if not reports or len(there) < min(self._quorum, len(self._at_work)):
            return None
        since_s = self._since_s.setdefault(fragment, now_s)
        if there != self._at_work and now_s < since_s + self._grace_s:
            return None
        self._open[fragment] = []
        del self._since_s[fragment]
        return Round(fragment, tuple(reports))


class Rounds:
    """The rounds of a world as the first process of one of its sites learns of them."""

    def __init__(self, outer: Peers, firsts: Sequence[int], settings: LocalSteps) -> None:
        """`firsts`: the first process of every site, by its number in `outer`."""
        self._outer, self._firsts = outer, firsts
        self._deciding = Deciding(settings, len(firsts)) if outer.rank == firsts[0] else None
        self._decided: list[Round] = []
        self._is_over = False

    def sent(self, fragment: int, report: Report) -> None:
        """Say that this site has sent a report."""
        self._say({"fragment": fragment, "report": report})

    def finished(self, site: int) -> None:
        """Say that this site's last reports are sent."""
        self._say({"finished": site})

    def _say(self, what: dict[str, object]) -> None:
        self._outer.post(self._firsts[0], REPORTS, json.dumps(what).encode())

    def look(self) -> None:
        """Decide where that is this process's to do, and hear of decisions; between steps, and while one waits."""
        if self._deciding is not None:
            self._decide(self._deciding)
        for _, payload in self._outer.poll(ROUNDS):
            said = json.loads(payload)
            self._is_over = said["over"]
            found = [Round(fragment, tuple(Report(*one) for one in reports)) for fragment, reports in said["rounds"]]
            self._decided += found

    def _decide(self, deciding: Deciding) -> None:
        for _, payload in self._outer.poll(REPORTS):
            said = json.loads(payload)
            if "finished" in said:
                deciding.finish(said["finished"])
            else:
                deciding.take(said["fragment"], Report(*said["report"]))
        rounds = deciding.decide(time.monotonic())
        if rounds or (deciding.is_over and not self._is_over):
            payload = json.dumps({"rounds": rounds, "over": deciding.is_over}).encode()
            for first in self._firsts:
                self._outer.post(first, ROUNDS, payload)

    def await_round(self, fragment: int | None, limit_s: float) -> tuple[list[Round], bool]:
        """The rounds of `fragment`, one at least, or of all where it is None, and whether no more will come. RunError
        when none is decided in time."""
        deadline_s = time.monotonic() + limit_s
        while True:
            self.look()
            found = [one for one in self._decided if fragment in (None, one.fragment)]
            if found or self._is_over:
                self._decided = [one for one in self._decided if one not in found]
                return found, self._is_over
            if time.monotonic() > deadline_s:
                raise RunError(f"waited {limit_s:g} s for a quorum of sites")
            time.sleep(POLL_S)
