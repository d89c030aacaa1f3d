"""Orders that are sought beside a run, as the helper process ``orders`` does it.

A question is ``{"problem": ..., "samples": [...], "search_s": ...}``, an answer ``{"schedule": ..., "is_last": ...}``:
first the best of the named and greedy orders, which takes milliseconds, then the best of all, found by a search in all
the time. The best is the one with the smallest mean over the samples: the problem with durations as they happened to
be in single steps. An order without any slack is the best only in theory.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, Final

from farpipe.core.errors import FarpipeError, InfeasibleError, InputError
from farpipe.core.schedule.library import ORDERS, order
from farpipe.core.step import Problem, Schedule
from farpipe.core.step.player import CodedSchedule, Player
from farpipe.core.strict import finite
from farpipe.planning.search import FoundOrder, search
from farpipe.planning.search.compile_ahead import small_problem
from farpipe.planning.search.step import (
    fits_memory,
    search_step,
    split_backwards,
    to_orders,
    to_schedule,
)

QUICK_METHODS: Final = ("named", "greedy")
MAX_QUICK_S: Final = 1.0
"""Seconds of the whole search's time that the first answer may take."""


def question(problem: Problem, samples: Sequence[Problem], search_s: float) -> str:
    """A line that asks for an order."""
    data = {"problem": problem.to_data(), "samples": [sample.to_data() for sample in samples]}
    return json.dumps(data | {"search_s": search_s}) + "\n"


def prepare(_head: dict[str, Any]) -> Callable[[dict[str, Any]], Iterator[dict[str, Any]]]:
    """Load everything that a search needs; what answers questions."""
    preload()
    return _answers


def _answers(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One or two answers."""
    problem, *samples = (Problem.from_data(item, "question") for item in (body["problem"], *body["samples"]))
    for schedule, is_last in seek(problem, samples, finite(body["search_s"])):
        yield {"schedule": None if schedule is None else schedule.to_data(), "is_last": is_last}


def seek(problem: Problem, samples: Sequence[Problem], search_s: float) -> Iterator[tuple[Schedule | None, bool]]:
    """(the best order so far, None where nothing fits memory; whether nothing more comes)"""
    step, players = search_step(problem), [Player(search_step(sample).arrays) for sample in samples]
    candidates = [orders for orders in _named_orders(problem, MAX_QUICK_S) if fits_memory(step, orders[1])]
    for limit_s, options in ((min(MAX_QUICK_S, search_s), {"methods": QUICK_METHODS}), (search_s, {})):
        found = _search(problem, limit_s, **options)
        if found is None:
            yield None, True
            return
        candidates.append((found.schedule.method, to_orders(found.schedule)))
        name, best = min(candidates, key=lambda pair: fmean(player.makespan_s(pair[1]) for player in players))
        is_last = found.proven or not options
        yield to_schedule(best, problem.num_microbatches, name), is_last
        if is_last:
            return


def _named_orders(problem: Problem, limit_s: float) -> Iterator[tuple[str, CodedSchedule]]:
    """The named orders that can be made in about `limit_s`, each as it is and with split backwards."""
    until_s = time.monotonic() + limit_s
    for name in ORDERS:
        if time.monotonic() > until_s:
            return
        with suppress(InputError, InfeasibleError):
            orders = to_orders(order(name, problem))
            yield name, orders
            yield f"{name} split", split_backwards(orders)


def _search(problem: Problem, search_s: float, **options: Any) -> FoundOrder | None:
    try:
        return search(problem, search_s, **options)
    except FarpipeError:
        return None


def preload() -> None:
    """Load all that a search needs, in one that is soon over."""
    problem = small_problem()
    for _ in seek(problem, [problem], 0.5):
        pass
    search(problem, 0.5)
