"""Plan: layout, placement, partition, schedule and prediction - all that a run needs; and its file, with why."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BeforeValidator, Field, PlainSerializer

from farpipe.core.document import Document, Table
from farpipe.core.errors import InputError
from farpipe.core.schedule import check
from farpipe.core.simulate import Timeline, simulate
from farpipe.core.spec import Data, Job, Model, Recompute, Training
from farpipe.core.step import Problem, Schedule
from farpipe.core.strict import expect_format, validate
from farpipe.core.units import counted, format_bytes, format_percent, format_seconds
from farpipe.planning.cost import Layout, Placement, settle, v_shape
from farpipe.planning.planner.candidates import Candidate

CostClass = Literal["a setting", "other numbers", "a pin", "another batch", "bandwidth", "devices"]
"""Classes of cost of a change, the cheapest first."""
StrategyKind = Literal["one site", "pipeline", "replicas", "local steps"]


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


class Spread(Table):
    """The step time as a distribution, of steps over links that lose packets or jitter."""

    mean_s: float
    p50_s: float
    p90_s: float
    """Time that nine of ten steps do not exceed."""
    num_samples: int

    def to_figures(self) -> dict[str, float]:
        """Figures for ``--json``: `step_mean_s`, `step_p50_s`, `step_p90_s`."""
        return {"step_mean_s": self.mean_s, "step_p50_s": self.p50_s, "step_p90_s": self.p90_s}

    def __str__(self) -> str:
        mean, p50, p90 = map(format_seconds, (self.mean_s, self.p50_s, self.p90_s))
        return f"step over {self.num_samples} samples: mean {mean}, half within {p50}, nine of ten within {p90}"


class Prediction(Table):
    """Figures that the simulator expects of one step."""

    step_s: float
    """Seconds from one step's start to the next one's; where links lose packets or jitter, the mean."""
    makespan_s: float
    period_s: float | None = Field(default=None, exclude_if=lambda seconds: seconds is None)
    """Seconds from one step to the next without a barrier; None: steps have one."""
    overhead_s: float
    """Optimizer, clipping, and whatever else is outside the pipeline."""
    bubble_ratio: float
    tokens_per_s: float
    exposed_inter_site_s: float
    """Seconds of waiting for messages between sites, mean over ranks."""
    exposed_intra_site_s: float
    peak_memory_bytes: tuple[float, ...]
    """Peak of one device, by rank."""
    link_bytes: dict[str, float]
    spread: Spread | None = Field(default=None, exclude_if=lambda spread: spread is None)
    """None where every step takes the same time."""

    @property
    def without_barrier(self) -> str:
        """`` (without a barrier; with one 1.2 s)``; empty where steps have one."""
        if self.period_s is None:
            return ""
        return f" (without a barrier; with one {format_seconds(self.makespan_s + self.overhead_s)})"


class RunnerUp(Table):
    """A layout that was evaluated and not taken: its step, and why it lost."""

    what: str
    method: str
    step_s: float
    reason: str
    peak_memory_bytes: float = 0.0
    """Of the fullest rank; 0 where it was not evaluated."""


class Strategy(Table):
    """One site set and its links, used as well as can be under the cost model that all strategies share."""

    kind: StrategyKind
    where: str
    """``a > b`` for a pipeline over both sites, ``a + b`` for replicas at each of them, ``a > b + c > d`` for both."""
    what: str
    """Layout in words."""
    step_s: float
    tokens_per_s: float
    num_devices: int
    inter_site_bytes: float
    """Per step, over all links between sites together."""
    usd_per_million_tokens: float
    unpriced: tuple[str, ...] = ()
    """Prices that are missing, as in `Money.unpriced`."""
    limited_by: str = ""
    training: str = ""
    """Differences from the training that the job asks for; empty where losses are the same but for rounding."""
    recovery: str = Field(default="", exclude_if=lambda name: name == "")
    """How it goes on after a failure: ``restart``, ``mirror``, ``survivors`` or ``local steps``; empty where no site of
    its states `mtbf`."""
    steps_lost_per_failure: float | None = Field(default=None, exclude_if=lambda steps: steps is None)
    goodput: float | None = Field(default=None, exclude_if=lambda share: share is None)
    """Share of its speed that failures leave."""
    alone_at: Annotated[str, Field(exclude_if=lambda name: not name)] = ""
    """With local steps: the site that is fastest alone, trained as asked."""
    alone_steps: Annotated[float, Field(exclude_if=lambda number: number == 0)] = 0.0
    """Whole steps that it does in the time of one of these."""

    @property
    def same_training(self) -> bool:
        """True if it trains as the job says."""
        return not self.training

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites in `where`, each once."""
        names = self.where.replace(" > ", " + ").split(" + ")
        return tuple(dict.fromkeys(name.partition(" (")[0] for name in names))


class Change(Table):
    """A change of the job that would help, and by how much as simulated."""

    what: str
    step_s: float
    gain: float
    """Relative gain in tokens per second."""
    costs: CostClass
    training: str = ""
    """Differences of the training; empty where it would not."""
    runs_on: tuple[str, ...] | None = None
    """Programs left to run the changed plan, ``farpipe`` or formats of ``export``; None: whatever runs the plan."""


class ByTrain(Table):
    """A plan that only an export can run, and what farpipe's own engine runs of the job instead."""

    obstacle: str
    """Parts of the plan that the engine can't run."""
    change: str
    """Keys of the job to say otherwise."""
    step_s: float | None = None
    """Step of the fastest plan that it can run; None where the job itself has to be changed first."""
    fastest: str = ""
    """Degrees of that plan."""
    quick: Annotated[bool, Field(exclude_if=lambda quick: not quick)] = False
    """True if that plan is a quick search's, since any is far slower: the fastest may be faster."""


class Explanation(Table):
    """What people ask about a plan: why not another, what limits it, what would help, how sure it is."""

    runners_up: tuple[RunnerUp, ...] = ()
    verdict: str = ""
    """Sentence on the use of the sites: one or several, and how much faster; empty where none were compared. One more
    where only an export can run the plan."""
    by_train: ByTrain | None = None
    """What `train` runs instead; None where it runs the plan."""
    advice: tuple[str, ...] = ()
    strategies: tuple[Strategy, ...] = ()
    """Strategies that were compared, the plan's own among them, the fastest first; empty unless asked for."""
    limited_by: str = ""
    residual: float = 0.0
    """Mean relative error of predictions of such jobs; 0 where all times are measured ones."""
    such_jobs: str = ""
    """Kind of jobs that the ranges are of, and the published steps that they rest on; empty where times are measured
    ones."""
    step_ratio_range: tuple[float, float] = (1.0, 1.0)
    """Measured over predicted step: where 8 of 10 such jobs were."""
    links_s: float = 0.0
    """Seconds of the step that links between sites cost."""
    links_range_s: tuple[float, float] = (0.0, 0.0)
    """Where these were in 8 of 10 such jobs."""
    tie_within: float = 0.0
    """Relative difference up to which a layout and the plan are a tie: the error of such differences."""
    tied: tuple[str, ...] = ()
    """Layouts that are a tie with the plan, the fastest first."""
    decides: str = ""
    """Sentence on what decides between these: memory, traffic or simplicity; empty where no layout is a tie."""
    unmeasured: tuple[str, ...] = ()
    """Devices in use whose times were never compared with a measurement; ``gh200 (bf16)``: not for these products."""
    uncompared: tuple[str, ...] = ()
    """Properties of the job, such as ``mixtures of experts``, that no measured step had that predictions were compared
    with."""
    changes: tuple[Change, ...] = ()
    """Changes that would help, from those that cost nothing to those that cost most."""

    @property
    def is_rough(self) -> bool:
        """True if the plan's figures rest on devices or kinds of models that nobody compared with a measurement."""
        return bool(self.unmeasured or self.uncompared)

    def of_another_order(self) -> Self:
        """What holds in any order of the same step: how sure its figures are."""
        names = ("residual", "such_jobs", "step_ratio_range", "unmeasured", "uncompared")
        return type(self)(**{name: getattr(self, name) for name in names})


class Plan(Document, Table, arbitrary_types_allowed=True):
    """All that a run needs."""

    FORMAT: ClassVar[str] = "farpipe/plan/1"
    INDENT: ClassVar[int | None] = 1

    job: Job
    layout: Layout
    placements: tuple[Placement, ...]
    problem: ProblemData
    schedule: ScheduleData
    prediction: Prediction

    @property
    def candidate(self) -> Candidate:
        """Layout and sites, without times."""
        by_rank = {placement.rank: placement.site for placement in self.placements}
        sites = tuple(self.job.cluster.site(by_rank[rank]) for rank in range(self.layout.pipeline))
        ranks = [placement.rank for placement in self.placements]
        return Candidate(self.layout, sites, self.layout.virtual == 2 and ranks == v_shape(self.layout.pipeline))

    @property
    def degrees(self) -> str:
        """Degrees and microbatches in words; with `data.packing` a replica computes chunks of any length."""
        at, degrees = self.layout, self.candidate.degrees
        if self.job.data.packing is None:
            return degrees
        if at.context > 1 and self.job.layout.context is None:
            own = f", each document over a group of the {at.context} devices ({at.context_exchange})"
            degrees = degrees.replace(at.sharing, own)
        return f"{degrees.rpartition(', ')[0]}, {counted(at.num_microbatches, 'chunk')} in the first batch"

    @property
    def sites(self) -> tuple[str, ...]:
        """The site of every rank."""
        return tuple(site.name for site in self.candidate.sites)

    @property
    def replicas(self) -> tuple[tuple[str, ...], ...]:
        """`[data][pipeline]`: the site of every rank in every replica; those at one site are neighbours."""
        at = self.layout
        homes = [(name,) * at.pipeline for name in at.replica_sites for _ in range(at.data_inside)]
        return tuple(homes) or (self.sites,) * at.data

    @property
    def timeline(self) -> Timeline:
        """The predicted step, action by action; it has the planned figures of the links, not a sample of them."""
        return simulate(self.problem, self.schedule, checked=True)

    @property
    def devices(self) -> dict[str, int]:
        """Devices in use by site."""
        return self.candidate.devices

    @property
    def where(self) -> str:
        """``a > b`` for a pipeline over both sites, ``a + b`` for replicas at each of them."""
        return self.candidate.where

    @property
    def num_tokens(self) -> int:
        """Tokens of the predicted step; with `data.packing` those of the first batch."""
        return round(self.prediction.tokens_per_s * self.prediction.step_s)

    @property
    def inter_site_bytes(self) -> dict[str, float]:
        """Bytes of a step over every directed link between sites, all replicas together."""
        between = self.problem.between_sites
        return {name: size for name, size in self.prediction.link_bytes.items() if between[name]}

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """Operations that every stage computes again in its backward pass."""
        return tuple(placement.recompute for placement in self.placements)

    @property
    def model(self) -> Model:
        """The job's model."""
        return self.job.model

    @property
    def data(self) -> Data:
        """The job's text."""
        return self.job.data

    @property
    def training(self) -> Training:
        """The job's training with all that was left to the planner decided."""
        settled = settle(self.job.training, self.layout)
        return settled.model_copy(update={"microbatch_size": self.layout.microbatch_size})

    @property
    def partition(self) -> tuple[tuple[int, int], ...]:
        """(first layer, end layer) of every stage."""
        return tuple((placement.first_layer, placement.end_layer) for placement in self.placements)

    @property
    def tensor(self) -> int:
        """Tensor-parallel devices of every rank in every replica."""
        return self.layout.tensor

    @property
    def context(self) -> int:
        """Devices that share each sequence, each `tensor` of them."""
        return self.layout.context

    @property
    def expert(self) -> int:
        """Devices that share the experts of each layer."""
        return self.layout.expert

    def to_body(self) -> dict[str, Any]:
        """Body of the JSON file, with an empty explanation."""
        return PlanDocument(plan=self).to_body()

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        """Plan in the body of a file, whose explanation is checked and left out."""
        return cast("Self", PlanDocument.from_body(body, source).plan)

    def __repr__(self) -> str:
        expected = self.prediction
        lines = [
            f"Plan for {self.job.model.name} over {self.where}: {self.degrees}, order {self.schedule.method}",
            f"  step {format_seconds(expected.step_s)}{expected.without_barrier}, bubble "
            f"{format_percent(expected.bubble_ratio)}, {expected.tokens_per_s:,.0f} tokens/s",
        ]
        lines += [
            f"  stage {index}: rank {p.rank} at {p.site}, layers {p.layers}, "
            f"peak {format_bytes(expected.peak_memory_bytes[p.rank])}"
            + ("" if p.recompute == "none" else f", recompute {p.recompute}")
            for index, p in enumerate(self.placements)
        ]
        return "\n".join(lines)

    __str__ = __repr__


class _Body(Plan, Explanation):
    """The keys of both side by side, so that one that neither has is told with the nearest of all."""


class PlanDocument(Document, Table):
    """A plan with its explanation: the file plan.json, where the keys of both lie side by side."""

    FORMAT: ClassVar[str] = Plan.FORMAT
    INDENT: ClassVar[int | None] = Plan.INDENT

    plan: Plan
    explanation: Explanation = Explanation()

    @property
    def step_range_s(self) -> tuple[float, float]:
        """Seconds that a step took in 8 of 10 such jobs."""
        low, high = self.explanation.step_ratio_range
        return self.plan.prediction.step_s * low, self.plan.prediction.step_s * high

    def to_body(self) -> dict[str, Any]:
        """Body of the JSON file."""
        of_plan, why = (one.model_dump(mode="json") for one in (self.plan, self.explanation))
        return of_plan | why

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        """Plan and explanation in the body of a file; a plan whose schedule does not fit its problem is refused."""
        read = dict(validate(_Body, body, source))
        plan = Plan(**{key: read[key] for key in Plan.model_fields})
        check(plan.problem, plan.schedule)
        return cls(plan=plan, explanation=Explanation(**{key: read[key] for key in Explanation.model_fields}))
