"""Check of an order: valid on steps of many shapes, the same twice, and plain about steps that it is not made for."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final, Literal

from farpipe.core.arguments import expect_kind
from farpipe.core.errors import InfeasibleError, InputError, UsersCodeError, fault_in
from farpipe.core.schedule import check
from farpipe.core.schedule.library import Order, expect_order, order
from farpipe.core.step import Hop, Link, Problem, Rank, Schedule, Stage, Transfer
from farpipe.core.units import counted

Shape = Literal["one stage per rank", "two stages per rank in a V", "stages round robin"]
SIZES: Final = ((1, 1), (2, 1), (2, 4), (3, 7), (4, 8), (4, 16), (8, 12))
"""Numbers of ranks and of microbatches."""
_PLACES: Final[dict[Shape, Callable[[list[int]], list[int]]]] = {
    "one stage per rank": lambda ring: ring,
    "two stages per rank in a V": lambda ring: ring + ring[::-1],
    "stages round robin": lambda ring: ring * 2,
}


def check_order(method: str | Order) -> tuple[Shape, ...]:
    """Check an order, a name, ``FILE.py:FUNCTION`` or a function; return the shapes of pipeline that it is defined for.

    On steps of 1 to 8 ranks and 1 to 16 microbatches, with equal stages and with stages, microbatches and links that
    all differ, it must return a Schedule that keeps the rules of `farpipe.core.schedule.check`, and the same one when
    it is asked again. InputError and InfeasibleError are how an order says that it is not defined for a step; of one
    shape at least it must be. Raises AssertionError with each shape's first fault, UsageError for an unknown name.
    """
    if isinstance(method, str):
        expect_order(method)
    elif not callable(method):
        expect_kind("check_order: method", method, (), "the name of an order, FILE.py:FUNCTION, or a function")
    broken: dict[Shape, list[str]] = {shape: [] for shape in _PLACES}
    defined: dict[Shape, None] = {}
    for shape, what, problem in problems():
        try:
            schedule = order(method, problem)
        except UsersCodeError as error:
            broken[shape].append(f"{what}: {error}")
            continue
        except (InputError, InfeasibleError):
            continue
        except Exception as error:
            broken[shape].append(f"{what}: {fault_in(error)}")
            continue
        if problem.num_ranks > 1:  # all shapes are the same on one rank
            defined[shape] = None
        broken[shape] += [f"{what}: {why}" for why in _faults(method, problem, schedule)]
    found = [_told(shape, faults) for shape, faults in broken.items() if faults]
    if not defined and not found:
        found = [f"it is defined for no step that was tried, not for {', nor for '.join(_PLACES)}"]
    assert not found, "\n".join(found)
    return tuple(defined)


def _told(shape: Shape, faults: list[str]) -> str:
    """The first fault in a shape, and what to do where no step of that shape worked."""
    if len(faults) < 2 * len(SIZES):
        return faults[0] if len(faults) == 1 else f"{faults[0]}\n({shape}: {len(faults)} such steps)"
    return f"{faults[0]}\n({shape}: no step works; raise farpipe.core.errors.InputError if the order is not for it)"


def _faults(method: str | Order, problem: Problem, schedule: Schedule) -> Iterator[str]:
    if order(method, problem).ranks != schedule.ranks:
        yield "another schedule when it is asked again"
    try:
        check(problem, schedule)
    except InputError as error:
        yield str(error)
    except InfeasibleError:
        pass  # `compare` and the planner say so and take another one


def problems() -> Iterator[tuple[Shape, str, Problem]]:
    """Steps of every shape and size, each with its shape and a name."""
    for shape, places in _PLACES.items():
        for num_ranks, num_microbatches in SIZES:
            for kind in ("equal", "different"):
                sizes = f"{counted(num_ranks, 'rank')}, {counted(num_microbatches, 'microbatch')}"
                what = f"{sizes}, {shape}, {kind} stages"
                ring = places([*range(num_ranks)])
                yield shape, what, _problem(ring, num_ranks, num_microbatches, differ=kind == "different")


def _problem(ring: list[int], num_ranks: int, num_microbatches: int, *, differ: bool) -> Problem:
    """A step over two sites, whose durations are 1, or differ by stage and microbatch."""
    stages = []
    for place, rank in enumerate(ring):
        seconds = [1.0 + (place * 7 + m * 3) % 5 / 4 if differ else 1.0 for m in range(num_microbatches)]
        figures = {name: tuple(seconds) for name in ("forward_s", "input_grad_s", "weight_grad_s")}
        stages.append(Stage(rank=rank, activation_bytes=1.0, weight_stash_bytes=0.25, **figures))
    rates = (1.0, 2.0) if differ else (1.0, 1.0)
    links = {
        name: Link(latency_s=2.0, bandwidth_bytes_per_s=rate) for name, rate in zip(("a>b", "b>a"), rates, strict=True)
    }
    site = ["a" if rank < (num_ranks + 1) // 2 else "b" for rank in ring]
    hops = [
        None
        if here == there
        else Hop(
            forward=Transfer(link=f"{here}>{there}", bytes=0.5), backward=Transfer(link=f"{there}>{here}", bytes=0.5)
        )
        for here, there in pairwise(site)
    ]
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(),) * num_ranks,
        stages=tuple(stages),
        links=links,
        hops=tuple(hops),
    )
