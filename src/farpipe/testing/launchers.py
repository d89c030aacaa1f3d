"""Check of launchers: what the service's loop relies on, tried with real attempts."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from farpipe.core.arguments import expect_kind
from farpipe.service.launcher import Key, Launcher, Seen

METRICS: Final = "run/metrics.jsonl"
LOOK_S: Final = 0.5

Order = Callable[[Key, int], tuple[Path, Mapping[str, int]]]
"""Makes the directory of an attempt, with its order for a training of so many steps; that and the devices by site."""


def check_launcher(launcher: Launcher, order: Order, *, limit_s: float = 300.0) -> None:
    """Check a launcher with the attempts 1 to 4 of a job ``check``: it starts two trainings of a few steps.

    Starts and stops that are done again do nothing again; what has ended stays ended; what is stopped before it has
    begun never begins; one that is stopped leaves with exit code 75; a start that can't work says why; files are read
    from any offset, and none outside of the attempt's directory. Each training has `limit_s` to end. Raises
    AssertionError with everything that is wrong.
    """
    for name in ("start", "look", "stop", "read"):
        if not callable(getattr(launcher, name, None)):
            expect_kind("check_launcher: launcher", launcher, (), "an object with start, look, stop and read")
    checked = _Checked(launcher, order, limit_s)
    broken = [*checked.barred(), *checked.wrong(), *checked.done(), *checked.stopped()]
    assert not broken, "\n".join(broken)


class _Checked:
    def __init__(self, launcher: Launcher, order: Order, limit_s: float) -> None:
        self._launcher, self._order, self._limit_s = launcher, order, limit_s

    def barred(self) -> Iterator[str]:
        """Stopped before it was started."""
        key = Key("check", 1)
        if (found := self._look(key)).state != "absent":
            yield f"an attempt that was never started is {found.state}"
        self._launcher.stop(key, 1.0)
        self._start(key, 2)
        time.sleep(3 * LOOK_S)
        found = self._until(key, lambda seen: seen.state != "alive")
        if found.state not in ("absent", "ended") or found.exit_code == 0:
            yield f"an attempt that was stopped before its start has begun: {found}"
        if self._launcher.read(key, METRICS, 0):
            yield "an attempt that was stopped before its start has trained"

    def wrong(self) -> Iterator[str]:
        """An order that can't be carried out."""
        key = Key("check", 2)
        folder, where = self._order(key, 2)
        (folder / "order.json").write_text('{"format": "farpipe/fleet-order/0"}')
        try:
            self._launcher.start(key, folder, where)
        except Exception as error:  # it may say so at once
            yield from () if f"{error}" else ["a wrong order is refused without a word"]
            return
        found = self._until(key, lambda seen: seen.state not in ("alive", "absent"))
        if found.state != "ended" or found.exit_code != 3 or "farpipe/fleet-order" not in found.why:
            yield f"an order of another format: expected exit code 3 and its reason, found {found}"

    def done(self) -> Iterator[str]:
        """Trained to its end, though started again and again."""
        key = Key("check", 3)
        for _ in range(3):
            self._start(key, 3)
        self._until(key, lambda seen: seen.state != "absent")
        self._start(key, 3)
        found = self._until(key, lambda seen: seen.state not in ("alive", "absent"))
        if (found.state, found.exit_code) != ("ended", 0):
            yield f"a training of 3 steps: expected the exit code 0, found {found}"
        data = self._launcher.read(key, METRICS, 0)
        if (steps := _steps(data)) != [0, 1, 2]:
            yield f"a training of 3 steps that was started four times did the steps {steps}"
        if self._launcher.read(key, METRICS, 10) != data[10:] or self._launcher.read(key, METRICS, len(data)):
            yield "what is read from an offset is not the rest of the file"
        yield from self._outside(key)
        self._start(key, 3)
        self._launcher.stop(key, 1.0)
        time.sleep(3 * LOOK_S)
        if (again := self._look(key)).state != "ended" or again.exit_code != found.exit_code:
            yield f"an attempt that has ended is started or stopped again: {again}"

    def stopped(self) -> Iterator[str]:
        """Stopped in the middle."""
        key = Key("check", 4)
        self._start(key, 100_000)
        self._until(
            key, lambda seen: seen.state not in ("alive", "absent") or bool(self._launcher.read(key, METRICS, 0))
        )
        for _ in range(2):
            self._launcher.stop(key, 60.0)
        found = self._until(key, lambda seen: seen.state != "alive")
        if (found.state, found.exit_code) != ("ended", 75):
            yield f"an attempt that was stopped: expected exit code 75, found {found}"
        elif not found.stored:
            yield "an attempt that was stopped has left no checkpoint"

    def _outside(self, key: Key) -> Iterator[str]:
        for name in ("../4/order.json", "../../../../../../etc/passwd", "/etc/passwd", "absent"):
            if self._launcher.read(key, name, 0):
                yield f"{name!r} is read, which is not in the attempt's directory"

    def _start(self, key: Key, num_steps: int) -> None:
        self._launcher.start(key, *self._order(key, num_steps))

    def _look(self, key: Key) -> Seen:
        return self._launcher.look([key])[key]

    def _until(self, key: Key, is_reached: Callable[[Seen], bool]) -> Seen:
        limit_s = time.monotonic() + self._limit_s
        while not is_reached(found := self._look(key)):
            assert time.monotonic() < limit_s, f"{key.job}/{key.attempt}: still {found} after {self._limit_s:g} s"
            time.sleep(LOOK_S)
        return found


def _steps(data: bytes) -> list[int]:
    lines = [json.loads(line) for line in data.splitlines() if line.endswith(b"}")]
    return [line["step"] for line in lines if "loss" in line]
