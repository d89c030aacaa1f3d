"""One step of four ranks at two sites, the problem that the benchmarks of the engine run with sleeping stages."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farpipe.core.step import Link, Problem

NUM_RANKS = 4
SITES = ("west", "west", "east", "east")


def two_by_two(link: "Link", message_bytes: float, times_s: tuple[float, float, float], microbatches: int) -> "Problem":
    """Problem of two ranks at each of two sites with `link` in both directions; `times_s` are those of F, I and W."""
    from farpipe.core.step import Hop, Problem, Rank, Stage, Transfer

    forward, backward = (Transfer(link=name, bytes=message_bytes) for name in ("west>east", "east>west"))
    work = dict(zip(("forward_s", "input_grad_s", "weight_grad_s"), times_s, strict=True))
    free = Hop()  # inside a site: memory of one machine
    return Problem(
        num_microbatches=microbatches,
        ranks=(Rank(),) * NUM_RANKS,
        stages=tuple(Stage(rank=rank, **work) for rank in range(NUM_RANKS)),
        links={"west>east": link, "east>west": link},
        hops=(free, Hop(forward=forward, backward=backward), free),
    )
