"""What ranks read of a plan: of one that no planner made, for rehearsals of an order, or of one site's own."""

from typing import Annotated, Any, Self

from pydantic import Field, InstanceOf, model_validator

from farpipe.core.schedule import check
from farpipe.core.spec import Data, Model, Training
from farpipe.core.spec.part import Count, Natural, Part, SiteName, fault
from farpipe.core.spec.recompute import Recompute
from farpipe.core.step import Problem, Schedule
from farpipe.core.strict import expect_format, validate
from farpipe.planning import Plan


class BarePlan(Part):
    """What ranks read of a plan: an order to rehearse, a step whose figures are given, or what one site does.

    Its names are those of a Plan, but everything about a model may be missing.
    """

    problem: InstanceOf[Problem]
    schedule: InstanceOf[Schedule]
    sites: Annotated[tuple[SiteName, ...], Field(min_length=1)]
    """The site of every rank of the pipeline."""
    replicas: tuple[tuple[SiteName, ...], ...] = ()
    """Data parallel: the sites of every replica's ranks, `sites` first; () for one replica. The Problem is one's."""
    tensor: Count = 1
    """Tensor-parallel processes of every rank in every replica; a rehearsal has one for all of them."""
    context: Count = 1
    """Processes that share each sequence, each `tensor` of them; in a rehearsal as well one for all."""
    expert: Count = 1
    """Of the processes of a site that have a stage, those that share the experts of each layer."""
    model: Model | None = None
    training: Training | None = None
    data: Data = Data()
    partition: tuple[tuple[Natural, Natural], ...] = ()
    """(first layer, end layer) of every stage."""
    recompute: tuple[Recompute, ...] = ()
    """Recomputation in the backward, per stage; () for none anywhere."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check(self.problem, self.schedule, memory=False)
        if len(self.sites) != self.problem.num_ranks:
            raise fault(f"expected one site per rank, {self.problem.num_ranks}, found {len(self.sites)}", "sites")
        if self.replicas and {len(sites) for sites in self.replicas} != {len(self.sites)}:
            raise fault(f"expected one site per rank, {len(self.sites)}, for every replica", "replicas")
        if self.replicas and self.replicas[0] != self.sites:
            raise fault(f"the first replica is at {self.replicas[0]}, but sites are {self.sites}", "replicas")
        return self

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """That of a planner's plan."""
        return cls(**{name: getattr(plan, name) for name in cls.model_fields})

    def to_body(self) -> dict[str, Any]:
        """All of it, for JSON."""
        body: dict[str, Any] = self.model_dump(mode="json", exclude={"problem", "schedule"}, exclude_none=True)
        return {**body, "problem": self.problem.to_data(), "schedule": self.schedule.to_data()}

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        """The inverse of `to_body`; InputError names the place of whatever is wrong."""
        read = dict(body)
        if "problem" in read:
            inner = expect_format(read["problem"], Problem.FORMAT, f"{source}: plan.problem")
            read["problem"] = validate(Problem, inner, source, "plan.problem")
        if "schedule" in read:
            read["schedule"] = Schedule.from_data(read["schedule"], f"{source}: plan.schedule")
        return validate(cls, read, source, "plan")
