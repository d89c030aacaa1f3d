"""Plan: layout, placement, partition, schedule and prediction - all that a run needs, in one JSON file."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from farpipe.cost import Layout, Placement, v_shape
from farpipe.document import Document
from farpipe.errors import InputError
from farpipe.schedule import check
from farpipe.spec import Job, Recompute
from farpipe.step import Problem, Schedule
from farpipe.strict import expect_format, validate
from farpipe.units import counted, format_bytes, format_percent, format_seconds

ArmKind = Literal["one site", "pipeline", "replicas", "mixture", "local steps"]


def _read_problem(value: Any) -> Any:
    if isinstance(value, Problem) or not isinstance(value, Mapping):
        return value
    return _as_value_error(lambda: expect_format(value, Problem.FORMAT, "problem"))


def _read_schedule(value: Any) -> Any:
    return value if isinstance(value, Schedule) else _as_value_error(lambda: Schedule.from_data(value))


def _as_value_error(read: Any) -> Any:
    try:
        return read()
    except InputError as error:
        raise ValueError(str(error)) from None


ProblemData = Annotated[Problem, BeforeValidator(_read_problem), PlainSerializer(lambda problem: problem.to_data())]
ScheduleData = Annotated[
    Schedule, BeforeValidator(_read_schedule), PlainSerializer(lambda schedule: schedule.to_data())
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Spread(_Part):
    """The step time as a distribution, of steps over links that lose packets or of figures that may be off."""

    mean_s: float
    p50_s: float
    p90_s: float
    """Nine of ten steps take no longer."""
    num_samples: int

    def to_figures(self) -> dict[str, float]:
        """As ``--json`` has them: `step_mean_s`, `step_p50_s`, `step_p90_s`."""
        return {"step_mean_s": self.mean_s, "step_p50_s": self.p50_s, "step_p90_s": self.p90_s}

    def __str__(self) -> str:
        mean, p50, p90 = map(format_seconds, (self.mean_s, self.p50_s, self.p90_s))
        return f"step over {self.num_samples} samples: mean {mean}, half within {p50}, nine of ten within {p90}"


class Prediction(_Part):
    """Figures that the simulator expects of one step."""

    step_s: float
    """From one step's start to the next one's: makespan and overhead; where links lose packets or jitter, the mean."""
    makespan_s: float
    overhead_s: float
    """Optimizer, clipping, and whatever else is outside the pipeline."""
    bubble_ratio: float
    tokens_per_s: float
    exposed_inter_site_s: float
    """Waiting for messages between sites, mean over ranks."""
    exposed_intra_site_s: float
    peak_memory_bytes: tuple[float, ...]
    """Of one device of every rank."""
    link_bytes: dict[str, float]
    spread: Spread | None = Field(default=None, exclude_if=lambda spread: spread is None)
    """None where every step is alike."""


class Choice(_Part):
    """One alternative that was looked at: what it would take, and why it was not taken."""

    what: str
    method: str
    step_s: float
    reason: str


class Arm(_Part):
    """One use of sites and links, at its best under the cost model that all arms share."""

    kind: ArmKind
    where: str
    """``a > b`` for a pipeline over both sites, ``a + b`` for replicas at each of them, ``a > b + c > d`` for both."""
    what: str
    """Its layout in words."""
    step_s: float
    tokens_per_s: float
    num_devices: int
    inter_site_bytes: float
    """Per step, over all links between sites together."""
    usd_per_million_tokens: float
    unpriced: tuple[str, ...] = ()
    """Prices missing in the price, as `Money.unpriced`."""
    limited_by: str = ""
    training: str = ""
    """Differences from the training that the job asks for; empty where losses are the same but for rounding."""

    @property
    def same_training(self) -> bool:
        """True if it trains as the job says."""
        return not self.training


class Change(_Part):
    """A change of the job that would help, and by how much as simulated."""

    what: str
    step_s: float
    gain: float
    """Relative gain in tokens per second."""
    costs: Literal["a setting", "other numbers", "another batch", "bandwidth", "devices"]
    training: str = ""
    """Differences of the training; empty where it would not."""


class PlanGroup(_Part):
    """Replicas that are unlike those of the plan's own layout, and train another share of the batch beside them."""

    layout: Layout
    placements: tuple[Placement, ...]
    problem: ProblemData
    schedule: ScheduleData
    peak_memory_bytes: tuple[float, ...]
    """Of one device of every rank."""

    @property
    def where(self) -> str:
        """``a > b`` for a pipeline over both sites."""
        return " > ".join(dict.fromkeys(placement.site for placement in self.placements))

    def __str__(self) -> str:
        return describe_shapes(self.layout, self.where)


class Plan(Document, _Part):
    """All that a run needs."""

    FORMAT: ClassVar[str] = "farpipe/plan/1"
    INDENT: ClassVar[int | None] = 1

    job: Job
    layout: Layout
    placements: tuple[Placement, ...]
    problem: ProblemData
    schedule: ScheduleData
    prediction: Prediction
    runners_up: tuple[Choice, ...] = ()
    advice: tuple[str, ...] = ()
    arms: tuple[Arm, ...] = ()
    """The other uses of the sites beside this one, the fastest first; empty where nobody asked for them."""
    limited_by: str = ""
    residual: float = 0.0
    """Mean relative error of predictions for the least known device in use; 0 where all times are measured ones."""
    unmeasured: tuple[str, ...] = ()
    """Devices in use whose times nobody has compared with a measurement; ``gh200 (bf16)``: not for these products."""
    changes: tuple[Change, ...] = ()
    """Changes that would help, from those that cost nothing to those that cost most."""
    groups: tuple[PlanGroup, ...] = Field(default=(), exclude_if=lambda groups: not groups)
    """Replicas beside those of `layout`, where they are not alike; `prediction` is of all of them together."""

    @property
    def step_range_s(self) -> tuple[float, float]:
        """The range in which the step is expected: the residual to both sides."""
        return self.prediction.step_s / (1 + self.residual), self.prediction.step_s * (1 + self.residual)

    @property
    def sites(self) -> tuple[str, ...]:
        """The site of every rank."""
        by_rank = {placement.rank: placement.site for placement in self.placements}
        return tuple(by_rank[rank] for rank in range(self.layout.pipeline))

    @property
    def replicas(self) -> tuple[tuple[str, ...], ...]:
        """`[data][pipeline]`: the site of every rank in every replica; those at one site are neighbours."""
        at = self.layout
        homes = [(name,) * at.pipeline for name in at.replica_sites for _ in range(at.data_inside)]
        return tuple(homes) or (self.sites,) * at.data

    @property
    def devices(self) -> dict[str, int]:
        """Devices in use by site."""
        used: dict[str, int] = {}
        at = self.layout
        for site in (site for replica in self.replicas for site in replica) if not self.unlike else ():
            used[site] = used.get(site, 0) + at.tensor * at.context
        for layout, placements in self.all_groups if self.unlike else ():
            for rank, site in {p.rank: p.site for p in placements}.items():
                used[site] = used.get(site, 0) + layout.of_rank(rank).devices_per_rank
        return used

    @property
    def all_groups(self) -> tuple[tuple[Layout, tuple[Placement, ...]], ...]:
        """Layout and placements of every group of replicas, this plan's own first."""
        return ((self.layout, self.placements), *((group.layout, group.placements) for group in self.groups))

    @property
    def where(self) -> str:
        """``a > b`` for a pipeline over both sites, ``a + b`` for replicas at each of them."""
        homes = self.layout.replica_sites
        mine = " + ".join(homes) if homes else " > ".join(dict.fromkeys(self.sites))
        return " + ".join([mine, *(group.where for group in self.groups)])

    @property
    def shape(self) -> str:
        """``, 2 stages per rank in a V``; empty with one stage per rank, whole sequences on it, and all alike."""
        if self.layout.shapes or self.groups:
            return f" ({'; '.join(self.unlike)})"
        if self.layout.virtual == 1:
            return self.layout.sharing
        in_v = [placement.rank for placement in self.placements] == v_shape(self.layout.pipeline)
        return f", {self.layout.virtual} stages per rank{' in a V' if in_v else ''}{self.layout.sharing}"

    @property
    def unlike(self) -> tuple[str, ...]:
        """The groups of replicas in words, where they or their ranks differ."""
        if not self.layout.shapes and not self.groups:
            return ()
        mine = " > ".join(dict.fromkeys(self.sites))
        return (describe_shapes(self.layout, mine), *map(str, self.groups))

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """Operations that every stage computes again in its backward pass."""
        return tuple(placement.recompute for placement in self.placements)

    def to_body(self) -> dict[str, Any]:
        """See Document."""
        return self.model_dump(mode="json")

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        """See Document; a plan whose schedule does not fit its problem is refused."""
        plan = validate(cls, body, source)
        check(plan.problem, plan.schedule)
        return plan

    def __repr__(self) -> str:
        at, expected = self.layout, self.prediction
        lines = [
            f"Plan for {self.job.model.name} over {self.where}: pipeline {at.pipeline} x data {at.data} x tensor "
            f"{at.tensor}{self.shape}, {counted(at.num_microbatches, 'microbatch')} of {at.microbatch_size}, "
            f"order {self.schedule.method}",
            f"  step {format_seconds(expected.step_s)}, bubble {format_percent(expected.bubble_ratio)}, "
            f"{expected.tokens_per_s:,.0f} tokens/s",
        ]
        lines += [
            f"  stage {index}: rank {p.rank} at {p.site}, layers {p.layers}, "
            f"peak {format_bytes(expected.peak_memory_bytes[p.rank])}"
            + ("" if p.recompute == "none" else f", recompute {p.recompute}")
            for index, p in enumerate(self.placements)
        ]
        return "\n".join(lines)

    __str__ = __repr__


def describe_shapes(layout: Layout, where: str) -> str:
    """``a > b: d4 t1, d2 t2, 32 microbatches of 8``, the sequences of a microbatch being those of all replicas."""
    ranks = [layout.of_rank(rank) for rank in range(layout.pipeline)]
    degrees = ", ".join(f"d{at.data} t{at.tensor}" for at in ranks)
    sequences = layout.data * layout.microbatch_size
    return f"{where}: {degrees}, {counted(layout.num_microbatches, 'microbatch')} of {sequences}"
