"""What the service shows of jobs, attempts, sites and links: the same for the API, the commands and the page."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from farpipe.core.errors import InputError
from farpipe.core.spec import Cluster
from farpipe.fleet.job import FleetJob, JobState, Spent
from farpipe.fleet.replacing import replace
from farpipe.fleet.requests import kind_of
from farpipe.fleet.snapshot import settled
from farpipe.fleet.state import FleetState
from farpipe.planning.cost.money import SECONDS_PER_HOUR
from farpipe.service.folder import JOB_NAME
from farpipe.service.submission import MOST_BYTES, submitted_job

NAME: Final = f"^{JOB_NAME}$"
"""Names of jobs, which are names of directories, and of tenants."""
Name = Annotated[str, Field(pattern=NAME)]
Devices = Annotated[int, Field(ge=1, le=1_000_000)]


class Body(BaseModel):
    """What a request sends: no unknown keys, no text in place of numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Submission(Body):
    """A job as its owner submits it. Its name is the key: what is sent twice is taken once."""

    name: Name
    job: Annotated[str, Field(min_length=1, max_length=MOST_BYTES)]
    """Content of the job.toml; it names no files."""
    min_devices: Devices | None = None
    """Least number of devices; without it that of the job's own cluster."""
    max_devices: Devices | None = None
    """Largest number of devices; without it the least."""
    deadline_s: Annotated[float, Field(ge=0, le=1e11)] | None = None
    """Unix time by which it should have ended."""

    def to_job(self, tenant: str, now_s: float) -> FleetJob:
        """The core's job; InputError names the key of the job.toml that is wrong."""
        job = submitted_job(self.job)
        own = sum(site.num_devices for site in job.cluster.sites)
        least = self.min_devices or min(own, self.max_devices or own)
        most = self.max_devices or least
        found = FleetJob(self.name, kind_of(job), now_s, job.training.num_steps, least, most, tenant, self.deadline_s)
        if found.fault:
            raise InputError(f"job {self.name!r}: {found.fault}")
        return found


class SiteSpent(BaseModel):
    """What a job has used at a site so far; egress counts where it was sent."""

    device_hours: float = 0.0
    energy_kwh: float = 0.0
    carbon_g: float = 0.0
    usd: float = 0.0
    """Rent, electricity and egress."""


class JobView(BaseModel):
    """A job as it is now, or as it was when it ended. Times are Unix seconds."""

    name: str
    tenant: str
    phase: Literal["queued", "starting", "running", "stopping", "ended"]
    result: Literal["", "finish", "fail", "cancel"] = ""
    """How it ended; empty: it has not."""
    why: str = ""
    """Reason of its end, or of its last failure."""
    num_steps: int
    num_done: float
    """Steps done, as reported and since then as its speed lets expect."""
    num_stored: float
    """Steps in its last checkpoint."""
    step_s: float | None
    devices: dict[str, int]
    """Devices that it has, by site, in pipeline order."""
    attempt: int
    num_failures: int
    """Failures in a row."""
    submitted_s: float
    started_s: float | None
    end_s: float | None
    """When it will end, or has ended."""
    deadline_s: float | None
    usd: float
    """Rent, electricity and egress so far."""
    spent: dict[str, SiteSpent] = {}
    """What it has used, by site."""


class AttemptView(BaseModel):
    """One start of a job."""

    attempt: int
    place: str
    began_s: float
    ended_s: float | None
    result: str | None
    why: str | None
    num_steps: int
    """Steps that it has reported, counted from the job's begin."""
    num_stored: int


class SiteView(BaseModel):
    """A site and its devices."""

    name: str
    num_devices: int
    num_used: int
    num_free: int
    state: Literal["up", "draining", "lost"]
    jobs: list[str]
    usd_per_mwh: float
    carbon_g_per_kwh: float


class LinkView(BaseModel):
    """A directed link and what is reserved on it."""

    name: str
    bytes_per_s: float
    reserved_bytes_per_s: float
    latency_s: float


def job_view(state: FleetState, job: JobState, now_s: float) -> JobView:
    """A job that has not ended, at `now_s`."""
    here = job.placement
    account = settled(replace(state, now_s=max(now_s, state.now_s)), job.name) if job.name in state.jobs else job
    return JobView(
        name=job.name,
        tenant=job.job.tenant,
        phase=job.phase,
        why=job.last_failure,
        num_steps=job.job.num_steps,
        num_done=account.num_done,
        num_stored=job.num_stored,
        step_s=here.step_s if here else None,
        devices=dict(here.devices) if here else {},
        attempt=job.attempt,
        num_failures=job.num_failures,
        submitted_s=job.job.submit_s,
        started_s=job.first_start_s,
        end_s=job.end_s(),
        deadline_s=job.job.deadline_s,
        usd=account.spent.total_usd,
        spent=_by_site(account.spent),
    )


def _by_site(spent: Spent) -> dict[str, SiteSpent]:
    found = {site: SiteSpent(device_hours=seconds / SECONDS_PER_HOUR) for site, seconds in spent.device_s.items()}
    for part in (spent.rent_usd, spent.electricity_usd, spent.egress_usd):
        for place, usd in part.items():
            found.setdefault(place.split(">")[0], SiteSpent()).usd += usd
    for site, energy_kwh in spent.energy_kwh.items():
        found[site].energy_kwh, found[site].carbon_g = energy_kwh, spent.carbon_g.get(site, 0.0)
    return found


def ended_view(state: FleetState, job: JobState, result: str, why: str) -> JobView:
    """The job as it is when it has ended at the state's time."""
    end = {"phase": "ended", "result": result, "why": why, "end_s": state.now_s, "devices": {}, "step_s": None}
    step_s = job.placement.step_s if job.placement else None
    return job_view(state, job, state.now_s).model_copy(update=end | {"step_s": step_s})


def site_views(state: FleetState, cluster: Cluster, shown: Mapping[str, str]) -> list[SiteView]:
    """All sites; of the jobs there only those that are `shown`."""
    return [_site_view(state, site.name, site.num_devices, shown) for site in cluster.sites]


def _site_view(state: FleetState, name: str, num_devices: int, shown: Mapping[str, str]) -> SiteView:
    site, here = state.sites[name], dict[str, int]()
    for job in state.jobs.values():
        if job.placement is not None and name in job.placement.sites:
            here[job.name] = dict(job.placement.devices)[name]
    used, price = sum(here.values()), state.tariffs[name].price
    return SiteView(
        name=name,
        num_devices=num_devices,
        num_used=used,
        num_free=max(0, site.usable - used),
        state="lost" if not site.is_up else "draining" if site.num_devices < num_devices else "up",
        jobs=[job for job in here if job in shown],
        usd_per_mwh=price.usd_per_mwh,
        carbon_g_per_kwh=price.carbon_g_per_kwh,
    )


def link_views(state: FleetState, cluster: Cluster) -> list[LinkView]:
    """All directed links."""
    free = state.space().rates
    return [
        LinkView(
            name=link.name,
            bytes_per_s=state.rates[link.name],
            reserved_bytes_per_s=max(0.0, state.rates[link.name] - free[link.name]),
            latency_s=link.latency_s,
        )
        for link in cluster.links
    ]
