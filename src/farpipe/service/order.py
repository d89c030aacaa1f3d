"""Order for one attempt: a file in its directory that says what to train, where, and from which checkpoint."""

from pathlib import Path
from typing import Any, ClassVar, Final, Self

from farpipe.core.document import Document
from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster
from farpipe.core.spec.load import parse_job
from farpipe.core.spec.part import Count, Part, Positive, Text
from farpipe.core.strict import validate
from farpipe.fleet.plans import PlacedPlan, part_of, plan_as_quoted
from farpipe.fleet.state import FleetState
from farpipe.planning.cost import Layout

ORDER_NAME: Final = "order.json"


class Order(Document, Part):
    """One attempt of a job, decided on by the fleet."""

    FORMAT: ClassVar[str] = "farpipe/fleet-order/1"

    job: Text
    """The job.toml, as submitted; its cluster is not used."""
    num_steps: Count
    """Steps of the whole job."""
    part: Cluster
    """Devices and links that the attempt has."""
    layout: Layout | None
    """The quoted layout."""
    quoted_s: Positive
    """The quoted step."""
    resume: Text | None = None
    """Checkpoint to go on from; None: from the first step."""

    @classmethod
    def of(cls, state: FleetState, cluster: Cluster, name: str, job_toml: str, resume: Path | None) -> "Order":
        """The order for the newest attempt of the job `name`, which has devices."""
        job = state.job(name)
        if job.placement is None:
            raise InputError(f"job {name!r} is {job.phase}: it has no devices")
        return cls(
            job=job_toml,
            num_steps=job.job.num_steps,
            part=part_of(state, cluster, name),
            layout=job.placement.layout,
            quoted_s=job.placement.step_s,
            resume=None if resume is None else str(resume),
        )

    def to_body(self) -> dict[str, Any]:
        """Body of the JSON file."""
        return self.model_dump(mode="json")

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        """The inverse of `to_body`; InputError names the place of what is wrong."""
        return validate(cls, body, source)

    def plan(self) -> PlacedPlan:
        """The plan of the submitted job, with all its settings, where it was placed."""
        return plan_as_quoted(parse_job(self.job).request, self.part, self.layout, self.quoted_s)
