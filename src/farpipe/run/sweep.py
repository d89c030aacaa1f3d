"""Playing a sweep: on all cores or on a Ray cluster; what was found is kept in a file, and asked for only once."""

import json
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from farpipe.errors import InputError, RunError
from farpipe.plan.sweep import FORMAT, Point, Result, play
from farpipe.processes import die_with_parent
from farpipe.strict import read_text

Progress = Callable[[int, int], None]
"""Called with (points done, points in all)."""
Found = tuple[int, Result]
"""The number of a point, and what was found there."""

RAY_RETRIES: Final = 3
"""Times that a point is played again whose machine was lost."""
RAY_CONNECT_S: Final = 10.0
RAY_WAIT_S: Final = 60.0
"""Time between two looks at the cluster while nothing comes."""


class Player(Protocol):
    """Plays points somewhere, in any order."""

    def __call__(self, points: Sequence[Point]) -> Iterator[Found]: ...


def run_sweep(points: Sequence[Point], store: Path | None, player: Player, progress: Progress) -> list[Result]:
    """The result of every point; those that `store` has are not played again, and what is found is added to it.

    Every result is written when it is there, so that a sweep that was cut goes on where it was. InputError when `store`
    is something else, or when the job of a point is impossible.
    """
    known = {} if store is None else read_store(store)
    results = {n: Result.from_data(known[p.name], p.values) for n, p in enumerate(points) if p.name in known}
    left = [number for number in range(len(points)) if number not in results]
    progress(len(results), len(points))
    with _open_store(store) as file:
        for place, result in player([points[number] for number in left]) if left else ():
            results[left[place]] = result
            _keep(file, points[left[place]], result)
            progress(len(results), len(points))
    return [results[number] for number in range(len(points))]


def read_store(path: Path) -> dict[str, Any]:
    """Read the results of an earlier sweep, by the points' names; empty if there is no file.

    A last line that was cut is left out. InputError where the file is something else.
    """
    if not path.exists():
        return {}
    first, *lines = read_text(path).splitlines() or [""]
    if _parsed(first).get("format") != FORMAT:
        raise InputError(f"{path}: is there already, and no sweep of farpipe; give another file with --output")
    rows = [_parsed(line) for line in lines]
    return {row["point"]: row for row in rows if "point" in row and "arms" in row and "obstacle" in row}


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


@contextmanager
def _open_store(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    begun = path.exists() and path.stat().st_size > 0
    cut = begun and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" if cut else "" if begun else json.dumps({"format": FORMAT}) + "\n")
        yield file


def _keep(file: TextIO | None, point: Point, result: Result) -> None:
    if file is not None:
        file.write(json.dumps({"point": point.name} | result.to_data(), default=str) + "\n")
        file.flush()


def here(num_processes: int) -> Player:
    """Plays points in so many processes of this machine; in this one with 1."""

    def play_all(points: Sequence[Point]) -> Iterator[Found]:
        if num_processes == 1 or len(points) == 1:
            yield from ((number, play(point)) for number, point in enumerate(points))
            return
        # spawned, for a forked child of a process with numba's threads may hang
        context = multiprocessing.get_context("spawn")
        size = min(num_processes, len(points))
        pool = ProcessPoolExecutor(size, mp_context=context, initializer=_begin, initargs=(os.getpid(),))
        with _stopped_at_once(pool):
            numbers = {pool.submit(play, point): number for number, point in enumerate(points)}
            for future in as_completed(numbers):
                try:
                    yield numbers[future], future.result()
                except BrokenProcessPool:
                    raise RunError("a process of the sweep died, perhaps for lack of memory: use --jobs 1") from None

    return play_all


@contextmanager
def _stopped_at_once(pool: ProcessPoolExecutor) -> Iterator[None]:
    """Whatever ends the block, points that have not begun are dropped and the processes go."""
    try:
        yield
    except BaseException:
        processes = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        raise
    pool.shutdown(wait=True)


def _begin(parent: int) -> None:
    """In every process: Ctrl-C is the parent's to handle, and without a parent it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)


def on_ray(address: str) -> Player:
    """Plays points on a Ray cluster, each as a task of one CPU; farpipe must be installed on its machines.

    `address` is what ``ray.init`` takes: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``. InputError without Ray,
    RunError when the cluster can't be reached or a task is lost for good.
    """

    def play_all(points: Sequence[Point]) -> Iterator[Found]:
        ray = _ray(address)
        try:
            task = ray.remote(num_cpus=1, max_retries=RAY_RETRIES)(play)
            numbers = {task.remote(point): number for number, point in enumerate(points)}
            while numbers:
                done, _ = ray.wait(list(numbers), timeout=RAY_WAIT_S)
                if not done and not _any_alive(ray):
                    raise RunError(f"--ray {address}: no machine of the cluster is alive")
                for reference in done:
                    yield numbers.pop(reference), _got(ray, reference, address)
        finally:
            ray.shutdown()

    return play_all


def _ray(address: str) -> Any:
    try:
        ray = import_module("ray")
    except ImportError:
        raise InputError("--ray needs Ray: pip install 'farpipe[ray]'") from None
    try:
        _expect_listener(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, SystemExit) as error:  # Ray leaves where it meets no answer
        raise RunError(f"--ray {address}: no Ray cluster: {str(error).partition(chr(10))[0]}") from None
    return ray


def _expect_listener(address: str) -> None:
    """OSError unless somebody listens there: Ray itself tries for more than a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), RAY_CONNECT_S).close()


def _any_alive(ray: Any) -> bool:
    return any(node["Alive"] for node in ray.nodes())


def _got(ray: Any, reference: Any, address: str) -> Result:
    """InputErrors of a point are raised as they are."""
    try:
        return ray.get(reference)  # type: ignore[no-any-return]
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except ray.exceptions.RayError as error:
        raise RunError(f"--ray {address}: a task was lost: {str(error).splitlines()[0]}") from None
