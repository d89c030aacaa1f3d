"""Settings of a run, beside its plan."""

from typing import Literal

from pydantic import InstanceOf

from farpipe.core.spec import MetricsSettings
from farpipe.core.spec.part import Count, Flag, Natural, NonNegative, Part, Positive, Text
from farpipe.core.spec.publish import PublishSettings
from farpipe.core.spec.run_keys import ReplanSettings
from farpipe.core.step import LightPaths, Problem
from farpipe.engine.bare_plan import BarePlan
from farpipe.planning.cost.chunks import ChunkCosts
from farpipe.planning.workload import StepPlan, group_problem

DeviceKind = Literal["cpu", "cuda", "sleep"]
"""``sleep`` rehearses the schedule: stages take the Problem's time and pass its bytes, but compute nothing."""


class TransportSettings(Part):
    """Settings of the transport between the ranks."""

    streams: Count | None = None
    """TCP connections per channel; None: as many as the link's round trip and rate ask for."""
    timeout_s: Positive = 60.0
    """Longest wait for one message before the run ends with an error; outages don't count."""
    outage_s: Positive = 60.0
    """A connection that is gone for longer ends the run; a shorter outage is survived in place."""
    connect_timeout_s: Positive = 60.0
    """Longest wait for all ranks to meet."""


class LinkChange(Part):
    """A change of a link between sites: before `step` begins, it becomes another.

    Emulated links change by themselves. Those of a kernel WAN are changed by `run`, when the line of the step before is
    written; where somebody else changes them, ranks send at the new rate from `step` on.
    """

    step: Natural
    link: Text
    latency_s: NonNegative
    bandwidth_bytes_per_s: Positive


class RunSettings(Part):
    """Settings of a run, beside its plan."""

    num_steps: Count
    device: DeviceKind = "cpu"
    emulate_links: Flag = True
    """Delay messages between sites as the Problem's links would; only where all ranks are on one machine."""
    transport: TransportSettings = TransportSettings()
    metrics: MetricsSettings = MetricsSettings()
    publish: PublishSettings | None = None
    """When weights are published for subscribers elsewhere; None: never."""
    resume: Text | None = None
    """Go on from this checkpoint, or the newest one of this run directory, unless the run has one of its own."""
    peak_flops_per_s: Positive | None = None
    """Peak of all devices together, at the training's precision; None where the catalogue doesn't know it."""
    replan: ReplanSettings | None = None
    """Look for a better order while the run goes on; None: keep the one there is."""
    link_changes: tuple[LinkChange, ...] = ()
    light_paths: InstanceOf[LightPaths] | None = None
    """Light path of every message between stages; then emulated links carry the other messages only."""
    chunk_costs: InstanceOf[ChunkCosts] | None = None
    """Costs of chunks on the stages; with them (`data.packing`) every step has a plan of its own, and the run's plan is
    that of the first batch."""
    group_costs: tuple[InstanceOf[ChunkCosts], ...] = ()
    """The same for every number of processes that may share a chunk, ascending, where each has a group of its own out
    of all `context` processes of the one stage; `chunk_costs` is the last. Empty: all share all."""
    site_plans: tuple[InstanceOf[BarePlan], ...] = ()
    """What each site runs by itself, with local steps and layouts of their own; empty: its replicas of the plan."""
    seeks_orders: bool = False
    """True if faster orders than token-level 1F1B are sought for the steps on chunks while the run goes on."""

    def problem_of(self, plan: StepPlan) -> Problem:
        """A step on chunks as a Problem; in groups, that of the process that is done last."""
        assert self.chunk_costs is not None
        return group_problem(plan, self.group_costs) if plan.groups else plan.problem(self.chunk_costs)
