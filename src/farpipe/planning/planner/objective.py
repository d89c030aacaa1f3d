"""Objectives of a plan: step time, money, energy or carbon; and the Pareto front of the choices."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Job
from farpipe.planning.planner.candidates import decided, largest_sites, stages_of_zero
from farpipe.planning.planner.quote import OBJECTIVES, Objective, Quote
from farpipe.planning.planner.quotes import Planner

__all__ = ["OBJECTIVES", "Objective", "choose", "is_known", "known", "options", "pareto", "pinned_to"]

_NEEDED: Final[Mapping[Objective, tuple[str, ...]]] = {
    "time": (),
    "money": ("rent", "electricity", "egress"),
    "energy": ("power",),
    "carbon": ("power", "carbon"),
}
QUOTES_PER_SIZE: Final = 12
MAX_LISTED: Final = 4
"""Missing figures that a message names."""
GIVE_FIGURES: Final = (
    "give the sites of the job `prices` or a `region` (of devices: `power`), or ask for something else"
)
NOTHING_FITS: Final = "no layout of the job fits its sites; `farpipe plan` for the step time tells what is missing"


def options(planner: Planner, job: Job) -> list[Quote]:
    """The best layout of every site set for all devices, half of them, a quarter and so on.

    The fastest first, by the first stage of ZeRO with which anything fits (`stages_of_zero`). Of very many sites those
    that compute most are quoted (`largest_sites`).
    """
    job = largest_sites(job)
    every = (_options(planner, decided(job, zero)) for zero in stages_of_zero(job))
    return next((found for found in every if found), [])


def _options(planner: Planner, job: Job) -> list[Quote]:
    most = job.cluster.num_devices
    request, found = job.request, dict[tuple[object, ...], Quote]()
    while most:
        quotes = planner.quotes(request, job.cluster, max_devices=most, most=QUOTES_PER_SIZE)
        found |= {(quote.where, quote.layout, quote.in_v): quote for quote in quotes}
        most //= 2
    return sorted(found.values(), key=lambda quote: quote.step_s)


def unpriced(choices: Sequence[Quote]) -> str:
    """The prices that nobody gave, in one sentence; empty where none is missing."""
    missing = sorted({name for quote in choices for name in quote.money.unpriced if not name.startswith("carbon")})
    return f"Counted as nothing, for no figure was given: {', '.join(missing)}." if missing else ""


def is_known(quote: Quote, objective: Objective) -> bool:
    """True if nothing is missing in the figure that the objective looks at."""
    return not _missing(quote, objective)


def known(choices: Sequence[Quote], objectives: Sequence[Objective]) -> list[Quote]:
    """The choices of which the fewest kinds of figures are missing; InfeasibleError, with what is missing, where they
    have no figure at all for an objective."""
    if not choices:
        raise InfeasibleError(NOTHING_FITS)
    lacks = {id(one): sum(len(_missing(one, name)) for name in objectives) for one in choices}
    fewest = min(lacks.values())
    whole = [one for one in choices if lacks[id(one)] == fewest]
    for name in objectives:
        if all(_is_unknown(one, name) for one in whole):
            raise _no_figure(
                f"objectives {', '.join(objectives)}", min((_lacks(one, objectives) for one in whole), key=len)
            )
    return [one for one in whole if not any(_is_unknown(one, name) for name in objectives)]


def _is_unknown(quote: Quote, objective: Objective) -> bool:
    """True if nothing that the objective looks at has a figure."""
    return bool(_missing(quote, objective)) and quote.figure(objective) <= 0.0


def _no_figure(asked: str, lacks: Sequence[str]) -> InfeasibleError:
    more = f" and {len(lacks) - MAX_LISTED} more" if len(lacks) > MAX_LISTED else ""
    listed = ", ".join(lacks[:MAX_LISTED])
    return InfeasibleError(f"{asked}: there is no figure for {listed}{more}; {GIVE_FIGURES}")


def pareto(choices: Iterable[Quote], objectives: Sequence[Objective] = ("time", "money")) -> list[Quote]:
    """The choices that no other beats in one objective without losing in another, the fastest first."""
    every = sorted(choices, key=lambda quote: [quote.figure(name) for name in objectives])
    front: list[Quote] = []
    for quote in every:
        figures = [quote.figure(name) for name in objectives]
        if not any(all(f.figure(n) <= x for n, x in zip(objectives, figures, strict=True)) for f in front):
            front.append(quote)
    return front


def choose(choices: Sequence[Quote], objective: Objective) -> Quote:
    """The best choice; InfeasibleError when there is none, or when a price that matters is missing.

    A figure that is not known is not zero: choices of which fewer kinds of figures are missing come first.
    """
    if not choices:
        raise InfeasibleError(NOTHING_FITS)
    best = min(choices, key=lambda one: (len(_missing(one, objective)), one.figure(objective), one.step_s))
    if _is_unknown(best, objective):
        raise _no_figure(f"objective {objective!r}", _lacks(best, [objective]))
    return best


def _lacks(quote: Quote, objectives: Sequence[Objective]) -> list[str]:
    """The figures that the objectives need and nobody gave."""
    return sorted({name for one in objectives for names in _missing(quote, one).values() for name in names})


def _missing(quote: Quote, objective: Objective) -> dict[str, list[str]]:
    """The figures that the objective needs and nobody gave, by kind, each as `Money.unpriced` names it.

    Who pays rent for devices does not pay their electricity as well.
    """
    found: dict[str, list[str]] = {}
    unpriced = quote.money.unpriced
    for name in unpriced:
        kind, _, place = name.partition(" ")
        is_paid = kind == "electricity" and f"rent {place}" not in unpriced
        if kind in _NEEDED[objective] and not is_paid:
            found.setdefault(kind, []).append(name)
    return found


def pinned_to(job: Job, quote: Quote) -> Job:
    """The job pinned to a choice, for `plan` to divide its layers and order it."""
    at = quote.layout
    degrees = ("pipeline", "data", "tensor", "context", "expert", "virtual", "num_microbatches")
    pins = {name: getattr(at, name) for name in degrees} | {"sites": quote.sites}
    pins |= {"replicas": "across" if at.replica_sites else "inside"}
    if at.context > 1:
        pins["context_exchange"] = at.context_exchange
    training = job.training.model_copy(update={"microbatch_size": at.microbatch_size})
    return job.model_copy(update={"layout": job.layout.model_copy(update=pins), "training": training})
