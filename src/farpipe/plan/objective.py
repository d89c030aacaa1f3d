"""Objectives of a plan: step time, money, energy or carbon, under limits; and the Pareto front of the choices."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from farpipe.cost.money import Money, money_of_step
from farpipe.errors import InfeasibleError
from farpipe.plan.decided import largest_sites
from farpipe.plan.quote import Quote
from farpipe.plan.service import Planner
from farpipe.spec import Job, Pins

Objective = Literal["time", "money", "energy", "carbon"]
_NEEDED: Final[Mapping[Objective, tuple[str, ...]]] = {
    "time": (),
    "money": ("rent", "electricity", "egress"),
    "energy": ("power",),
    "carbon": ("power", "carbon"),
}
OBJECTIVES: Final[tuple[Objective, ...]] = ("time", "money", "energy", "carbon")
USES_PER_SIZE: Final = 12
MAX_LACKS_TOLD: Final = 4
"""Missing figures that a message names."""
GIVE_FIGURES: Final = (
    "give the sites of the job `prices` or a `region` (of devices: `power`), or ask for something else"
)
NOTHING_LEFT: Final = "no layout keeps all limits: allow more time, money, devices or sites"


@dataclass(frozen=True)
class Limits:
    """Limits that a choice must keep; None: no limit."""

    step_s: float | None = None
    """Longest step, for a deadline: the deadline over the number of steps."""
    usd_per_million_tokens: float | None = None
    devices: int | None = None
    """At all sites together."""
    sites: tuple[str, ...] | None = None
    """Sites that may be used: quota, or data that must stay where it is."""


@dataclass(frozen=True)
class Option:
    """One choice: its quote, by closed forms, and what a million tokens cost."""

    quote: Quote
    money: Money
    """Of a million tokens; `unpriced` names what no price was given for."""

    def figure(self, objective: Objective) -> float:
        """Figure minimized by `objective`: seconds of a step, or USD, kWh or grams of carbon per million tokens."""
        figures = {
            "time": self.quote.step_s,
            "money": self.money.total_usd,
            "energy": self.money.energy_kwh,
            "carbon": self.money.carbon_g,
        }
        return figures[objective]


def options(planner: Planner, job: Job, limits: Limits | None = None) -> list[Option]:
    """The best layout of every use of sites for all devices, half of them, a quarter and so on, as far as limits allow.

    The fastest first. Of very many sites that limits allow those that compute most are looked at (`largest_sites`).
    """
    limits = limits or Limits()
    if limits.sites is not None:
        job = job.model_copy(update={"cluster": job.cluster.within(limits.sites)})
    job = largest_sites(job)
    most = min(job.cluster.num_devices, limits.devices or job.cluster.num_devices)
    request, found = job.request, dict[tuple[object, ...], Option]()
    while most:
        quotes = planner.quotes(request, job.cluster, max_devices=most, most=USES_PER_SIZE)
        found |= {(quote.where, quote.layout, quote.in_v): _option(job, quote) for quote in quotes}
        most //= 2
    allowed = [option for option in found.values() if _keeps(option, limits)]
    return sorted(allowed, key=lambda option: option.quote.step_s)


def _option(job: Job, quote: Quote) -> Option:
    sent = {name: rate * quote.step_s for name, rate in quote.link_bytes_per_s.items()}
    step = money_of_step(job.cluster, quote.devices, quote.step_s, sent)
    return Option(quote, step.per_million_tokens(job.training.tokens_per_step))


def _keeps(option: Option, limits: Limits) -> bool:
    dear = limits.usd_per_million_tokens is not None and option.money.total_usd > limits.usd_per_million_tokens
    slow = limits.step_s is not None and option.quote.step_s > limits.step_s
    return not dear and not slow


def is_known(option: Option, objective: Objective) -> bool:
    """True if nothing is missing in the figure that the objective looks at."""
    return not _missing(option, objective)


def known(choices: Sequence[Option], objectives: Sequence[Objective]) -> list[Option]:
    """The choices of which all figures that the objectives need are known; InfeasibleError, with what is missing, where
    there are none."""
    if not choices:
        raise InfeasibleError(NOTHING_LEFT)
    whole = [option for option in choices if all(is_known(option, name) for name in objectives)]
    if not whole:
        lacks = min((_lacks(option, objectives) for option in choices), key=len)
        more = f" and {len(lacks) - MAX_LACKS_TOLD} more" if len(lacks) > MAX_LACKS_TOLD else ""
        told = ", ".join(lacks[:MAX_LACKS_TOLD])
        raise InfeasibleError(
            f"objectives {', '.join(objectives)}: there is no figure for {told}{more}; {GIVE_FIGURES}"
        )
    return whole


def pareto(choices: Iterable[Option], objectives: Sequence[Objective] = ("time", "money")) -> list[Option]:
    """The choices that no other beats in one objective without losing in another, the fastest first."""
    every = sorted(choices, key=lambda option: [option.figure(name) for name in objectives])
    front: list[Option] = []
    for option in every:
        figures = [option.figure(name) for name in objectives]
        if not any(all(f.figure(n) <= x for n, x in zip(objectives, figures, strict=True)) for f in front):
            front.append(option)
    return front


def choose(choices: Sequence[Option], objective: Objective) -> Option:
    """The best choice; InfeasibleError when no choice keeps the limits, or when a price that matters is missing.

    A figure that is not known is not zero: choices of which fewer kinds of figures are missing come first.
    """
    if not choices:
        raise InfeasibleError(NOTHING_LEFT)
    best = min(choices, key=lambda one: (len(_missing(one, objective)), one.figure(objective), one.quote.step_s))
    missing = [name for names in _missing(best, objective).values() for name in names]
    if missing and best.figure(objective) <= 0.0:
        raise InfeasibleError(f"objective {objective!r}: there is no figure for {', '.join(missing)}; {GIVE_FIGURES}")
    return best


def _lacks(option: Option, objectives: Sequence[Objective]) -> list[str]:
    """The figures that the objectives need and nobody gave."""
    return sorted({name for one in objectives for names in _missing(option, one).values() for name in names})


def _missing(option: Option, objective: Objective) -> dict[str, list[str]]:
    """The figures that the objective needs and nobody gave, by kind, each as `Money.unpriced` names it."""
    found: dict[str, list[str]] = {}
    for name in option.money.unpriced:
        if (kind := name.split()[0]) in _NEEDED[objective]:
            found.setdefault(kind, []).append(name)
    return found


def pinned_to(job: Job, option: Option) -> Job:
    """The job pinned to a choice, for `make_plan` to divide its layers and order it."""
    at, quote = option.quote.layout, option.quote
    pins = Pins(
        pipeline=at.pipeline,
        data=at.data,
        tensor=at.tensor,
        virtual=at.virtual,
        sites=quote.sites,
        num_microbatches=at.num_microbatches,
        replicas="across" if at.replica_sites else "inside",
    )
    size = {"microbatch_size": at.microbatch_size}
    return job.model_copy(update={"layout": pins, "training": job.training.model_copy(update=size)})
