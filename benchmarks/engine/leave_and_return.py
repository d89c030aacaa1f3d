"""Sites leave and return, again and again, beside the same training undisturbed. Prints JSON.

Exact replicas at sites 10 ms and 100 Mbit/s apart train a small model, each a pipeline of --ranks processes, or with
--fsdp 2 processes that share weights. In every round something befalls one of two sites while one of its ranks is in a
named phase of a step (benchmarks/shared/phases.py); all kinds take turns, and all phases:

    kill    SIGKILL to its agent and its ranks
    ranks   SIGKILL to its ranks alone; its agent starts them again
    stop    SIGSTOP to all of its processes, and SIGCONT after --away seconds
    cut     its links drop everything for --away seconds, and both sides go on (only with --wan, as root)
    dark    the same, and SIGKILL to all of it: so no connection breaks, it is only silent

The next round begins when the site is back. With --into every round is a line of a file as soon as it is over, and the
figures are those of all rounds in it, of earlier pieces too: --begin 5 --rounds 5 goes on where --rounds 5 has ended.
With --minutes there are three sites instead, and what befalls two of them
is drawn from --seed, --pause seconds after the event before in the mean. As root the third has monotonic clocks an hour
ahead and wall clocks an hour behind (links are not emulated then), and a disk of its own that gets full. Beside it a
mirrored checkpoint of two other processes is cut in the middle (benchmarks/engine/mirror.py --cut).

In the end the run is told to leave, and goes on with all sites for some steps. Exit code 1 unless losses and gradient
norms of all steps, and weights and moments of all sites at the end, are those of the undisturbed run, bit for bit, exit
codes are right, and no process is left.

    python -m benchmarks.engine.leave_and_return --rounds 20 --wan [--into rounds.jsonl]
    python -m benchmarks.engine.leave_and_return --minutes 120
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

from benchmarks.shared.disturbed import CHECKPOINT_STEPS, Disturbed, Layout, processes_of, say, surroundings
from benchmarks.shared.phases import PHASES

SITES = ("zurich", "lugano", "geneva")
STEPS_BETWEEN = 8
"""Steps of all sites together before the next round."""
STOPPED = 75
"""Exit code of a run that was told to leave and has written a checkpoint."""
PACE_S = 0.2
"""Shortest steps while sites are disturbed: processes that start have the processors for themselves in between, and the
undisturbed run, which does not wait, is over sooner."""
LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--begin", type=int, default=0, help="number of the first round")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--fsdp", type=int, default=0)
    parser.add_argument("--away", type=float, default=6.0)
    parser.add_argument("--wan", action="store_true")
    parser.add_argument("--kinds", default="")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=5.0)
    parser.add_argument("--pace", type=float, default=PACE_S, help="shortest steps while sites are disturbed, seconds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = options.kinds.split(",") if options.kinds else ["kill", "ranks", "stop", *["cut", "dark"] * options.wan]
    layout = Layout(options.fsdp, fsdp=True) if options.fsdp else Layout(options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        if options.minutes:
            sites = Disturbed(Path(folder), SITES, layout, emulates=os.geteuid() != 0, pace_s=options.pace)
            result = at_random(sites, 60 * options.minutes, options.seed, options.away, options.pause)
        else:
            result = in_rounds(
                Path(folder),
                layout,
                range(options.begin, options.begin + options.rounds),
                kinds,
                options.away,
                wan=options.wan,
                into=options.into,
            )
    print(json.dumps(result, indent=1))
    sys.exit(0 if all(result["equal to the undisturbed run"].values()) and not result["processes left"] else 1)


def in_rounds(
    folder: Path,
    layout: Layout,
    numbers: range,
    kinds: Sequence[str],
    away_s: float,
    *,
    wan: bool,
    into: Path | None = None,
) -> dict[str, Any]:
    """Rounds one after the other between two sites; `into`: file of these rounds and of those before."""
    disturbed, file = Disturbed(folder, SITES[:2], layout, pace_s=PACE_S), into or folder / "rounds.jsonl"
    done: list[int] = []

    def disturb() -> None:
        for number in numbers:
            victim, survivor = SITES[1 - number // len(PHASES) % 2], SITES[number // len(PHASES) % 2]
            found = _round(disturbed, kinds[number % len(kinds)], victim, survivor, number, away_s)
            if found is None:
                return
            done.append(number)
            with file.open("a") as lines:
                lines.write(json.dumps(found) + "\n")
            say(json.dumps(found))

    disturbed.train(disturb, wan=wan)
    rounds = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    figures = {
        "processes a site": layout.ranks,
        "fsdp": layout.fsdp,
        "phases": sorted({one["phase"] for one in rounds}),
    }
    return figures | _figures(rounds) | report(disturbed, {"all rounds": done == [*numbers]})


def _round(
    disturbed: Disturbed, kind: str, victim: str, survivor: str, number: int, away_s: float
) -> dict[str, Any] | None:
    """One round; None where the run ends, or nothing happens for a long time.

    Lost seconds: from the failure until the site is back, less the time that the steps done meanwhile take with both;
    alone they count for half the speed at most, though a site alone is as fast here, where both share two cores.
    """
    lines, phase = disturbed.lines[survivor], number % len(PHASES)
    if not disturbed.wait_until(lambda: disturbed.num_together(survivor) >= STEPS_BETWEEN):
        return None
    step_s = median(line["step_s"] for _, line in lines[-STEPS_BETWEEN:])
    ambush = disturbed.ambush(victim, number // 2 % disturbed.layout.ranks)
    was_there = ambush.lay(phase, limit_s=5.0 + 5 * step_s)
    at_s, before = time.monotonic(), len(lines)
    mend = disturbed.befall(kind, victim)
    ambush.release()
    if not disturbed.wait_until(lambda: bool(disturbed.without_since(survivor, victim, at_s))):
        return None
    first_s, _ = disturbed.without_since(survivor, victim, at_s)[0]
    if kind in ("stop", "cut", "dark"):
        time.sleep(away_s)
    mend()
    mended_s = time.monotonic()
    if not disturbed.wait_until(lambda: disturbed.num_together(survivor) >= 1 and lines[-1][0] > first_s):
        return None
    entered = [e for _, line in lines for e in line.get("site_events", ()) if e["kind"] == "entered"]
    done, away = [line for _, line in lines[before:]], time.monotonic() - at_s
    return {
        "kind": kind,
        "site": victim,
        "phase": PHASES[phase] if was_there else "none",
        "step_s": step_s,
        "next step completed after, s": first_s - at_s,
        "back after, s": at_s + away - mended_s,
        "away, s": away,
        "lost, s": away - min(len(done) * step_s, step_s + (away - first_s + at_s) / 2),
        "bytes": entered[-1].get("sent_bytes", 0),
    }


def _figures(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    of_kind = {
        kind: [found for found in rounds if found["kind"] == kind]
        for kind in dict.fromkeys(found["kind"] for found in rounds)
    }
    shown = ("next step completed after, s", "back after, s", "lost, s", "bytes", "step_s")
    table = {
        kind: {"number": len(found)}
        | {
            f"{name}, {how}": round(choose(one[name] for one in found), 2)
            for name in shown
            for how, choose in (("median", median), ("most", max))
        }
        for kind, found in of_kind.items()
    }
    return {"rounds": table, "goodput at one failure an hour a site": goodput(rounds)} if rounds else {"rounds": table}


def goodput(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """From the seconds of training that a failure costs here, and as `plan` plays it for sites away as long."""
    from farpipe.planning.explain.goodput import NUM_FAILURES, UnderFailures, failures_of, play

    step_s, away_s = (choose(one[name] for one in rounds) for choose, name in ((median, "step_s"), (mean, "away, s")))
    sites: list[Any] = [SimpleNamespace(name=name, mtbf_s=3600.0, mttr_s=away_s) for name in SITES[:2]]
    horizon_s = NUM_FAILURES * 3600.0 / len(sites)

    run = UnderFailures(
        step_s,
        "survivors",
        speed=lambda away: (1 - len(away) / len(sites)) / step_s,
        every_steps=CHECKPOINT_STEPS,
        num_sites=len(sites),
    )
    lost_s = mean(one["lost, s"] for one in rounds)
    return {
        "seconds lost per failure": round(lost_s, 2),
        "measured": round(1 - len(sites) * lost_s / 3600, 4),
        "predicted": round(play(run, failures_of(sites, horizon_s), horizon_s).share, 4),
    }


def at_random(disturbed: Disturbed, length_s: float, seed: int, away_s: float, pause_s: float) -> dict[str, Any]:
    """Three sites, and what a seed draws; the first is left alone, so that there is always one to return to."""
    is_root, draw = os.geteuid() == 0, random.Random(seed)
    count = Counter[str]()
    mends: dict[str, tuple[float, Callable[[], None]]] = {}

    def mend(now_s: float) -> None:
        for site in [site for site, (at_s, _) in mends.items() if now_s > at_s]:
            mends.pop(site)[1]()

    def disturb() -> None:
        disturbed.wait_until(lambda: all(disturbed.num_together(site) >= STEPS_BETWEEN for site in SITES))
        next_s, is_full = time.monotonic(), False
        end_s = next_s + length_s
        while time.monotonic() < end_s or mends:
            time.sleep(0.05)
            mend(time.monotonic())
            free = [site for site in SITES[1:] if site not in mends]
            if time.monotonic() < next_s or not free or time.monotonic() > end_s:
                continue
            next_s = time.monotonic() + 1.0 + draw.expovariate(1 / pause_s)
            kind, victim = draw.choice(("kill", "ranks", "stop")), draw.choice(free)
            if is_root and not is_full and SITES[2] in free:
                kind, victim, is_full = "disk", SITES[2], True
            count[kind] += 1
            say(f"{kind} {victim}")
            mends[victim] = time.monotonic() + draw.uniform(0.2, 2) * away_s, disturbed.befall(kind, victim)
        disturbed.wait_until(lambda: disturbed.num_together(SITES[0]) >= STEPS_BETWEEN)

    command = [sys.executable, "-m", "benchmarks.engine.mirror", "--cut"]
    mirror = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with surroundings(disturbed, *SITES[2:] * 2) if is_root else nullcontext():
        disturbed.train(disturb, wan=False)
        cut = json.loads(mirror.communicate(timeout=LIMIT_S)[0])
        facts = {"seed": seed, "seconds": length_s, "events": dict(count), "own clock and disk": is_root, "mirror": cut}
        return facts | report(disturbed, {f"mirror: {name}": one is True for name, one in cut.items()})


def report(disturbed: Disturbed, further: dict[str, bool]) -> dict[str, Any]:
    """What came of it, beside the undisturbed run of as many steps."""
    calm = disturbed.train_undisturbed()
    one, other = disturbed.figures(), calm.figures()
    digests = {*disturbed.digests(), *calm.digests()}
    runs = (disturbed, calm)
    return {
        "steps": disturbed.num_steps,
        "equal to the undisturbed run": {
            "losses and norms": one == other and len(one) == disturbed.num_steps,
            "weights and moments of all sites": len(digests) == 1 and "none" not in digests,
            "exit codes": [code for run in runs for code in run.exits] == [STOPPED, 0, 0],
            **further,
        },
        "processes left": sum(len(processes_of(run.run_dir, site)) for run in runs for site in disturbed.sites),
    }


if __name__ == "__main__":
    main()
