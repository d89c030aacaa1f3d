"""The routes of the service under ``/v1``: jobs, sites and links, tokens."""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from farpipe.fleet.events import DevicesChanged, Event, JobCancelled, JobSubmitted, LinkChanged, SiteBack, SiteLost
from farpipe.fleet.replacing import replace
from farpipe.fleet.state import FleetState
from farpipe.fleet.waiting import why_waiting
from farpipe.service.auth import Asker, Role, asker, new_token
from farpipe.service.instance import Instance
from farpipe.service.problems import ConflictError, NotFoundError, TooManyError
from farpipe.service.reading import LogPart, Step, log_part, masked, steps_of
from farpipe.service.store import Row
from farpipe.service.views import (
    NAME,
    AttemptView,
    Body,
    JobView,
    LinkView,
    Name,
    SiteView,
    Submission,
    job_view,
    link_views,
    site_views,
)
from farpipe.service.what_if import changes, ends
from farpipe.service.writer import Ask

MOST_WAITING: Final = 1000
"""Jobs of one tenant that have not ended."""
router = APIRouter(prefix="/v1")
bearer = HTTPBearer(auto_error=False, description="A token of `farpipe fleet token`.")


def instance_of(request: Request) -> Instance:
    """The instance that the application serves."""
    found: Instance = request.app.state.instance
    return found


Service = Annotated[Instance, Depends(instance_of)]


def asking(role: Role) -> Any:
    """Dependency: who asks, with `role` at least."""

    async def found(service: Service, given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> Asker:
        who = await run_in_threadpool(asker, service.store, given.credentials if given else "")
        who.expect(role)
        return who

    return Depends(found)


Viewer = Annotated[Asker, asking("viewer")]
Submitter = Annotated[Asker, asking("submitter")]
Operator = Annotated[Asker, asking("operator")]
JobName = Annotated[str, Path(pattern=NAME, description="Name of a job.", examples=["first"])]
Limit = Annotated[int, Query(ge=0, le=1000)]


class JobList(BaseModel):
    """Jobs: those that have not ended by submission, then the ended ones, the newest first."""

    jobs: list[JobView]


class Why(BaseModel):
    """Why a job waits and what would start it, or how it goes or went."""

    name: str
    phase: str
    why: str


class Change(Body):
    """One thing that could be different: a key of what can be asked."""

    change: Annotated[str, Field(max_length=400)]


class WhatIf(BaseModel):
    """End of a job as things are, and with the change: Unix seconds, or why it has none."""

    name: str
    end_s: float | None
    why: str
    changed_end_s: float | None
    changed_why: str


class Rate(Body):
    """Another rate of a link; 0: it is down."""

    bytes_per_s: Annotated[float, Field(ge=0, le=1e15)]


class Wanted(Body):
    """A token to make."""

    role: Role
    tenant: Name
    days: Annotated[int, Field(ge=1, le=3650)] = 30


class TokenView(BaseModel):
    """A token without its secret."""

    id: str
    role: Role
    tenant: str
    until_s: float


class NewToken(TokenView):
    """A token that was made; it is shown this once."""

    token: str


class LogEntry(BaseModel):
    """A decision: when, who asked for what, and the core's entry."""

    number: int
    time_s: float
    who: str
    entry: dict[str, Any]


@router.post("/jobs", status_code=201, responses={200: {"description": "The same job again.", "model": JobView}})
async def submit(job: Submission, service: Service, who: Submitter, response: Response) -> JobView:
    """Submit a job. Sent twice, it is taken once: its name is the key."""
    taken = await run_in_threadpool(job.to_job, who.tenant, service.now_s)
    row = {"name": job.name, "tenant": who.tenant, "submission": job.model_dump_json(), "submitted_s": taken.submit_s}
    repeated = list[Row]()

    def events(state: FleetState, now_s: float) -> Sequence[Event]:
        if (known := service.store.job(job.name)) is not None and _is_same(known, row, state):
            repeated.append(known)
            return ()
        if sum(one.job.tenant == who.tenant for one in state.jobs.values()) >= MOST_WAITING:
            raise TooManyError(f"{who.tenant!r} has {MOST_WAITING} jobs that have not ended; wait or cancel some")
        return (JobSubmitted(now_s, taken),)

    state = await service.give(Ask(events, ConflictError, row, f"{who.id} submits {job.name}"))
    if repeated:
        response.status_code = 200
    return await run_in_threadpool(_view, service, state, job.name, who)


def _is_same(known: Row, row: Row, state: FleetState) -> bool:
    """True for the same submission again; ConflictError where the name is another's."""
    if (known["tenant"], known["submission"]) == (row["tenant"], row["submission"]):
        return True
    if known["ended_s"] is None:
        raise ConflictError(f"job {row['name']!r}: there is another job of that name; give each its own")
    if row["name"] not in state.ended:
        raise ConflictError(f"job {row['name']!r}: the name was used long ago; choose another")
    return False


def _view(service: Instance, state: FleetState, name: str, who: Asker) -> JobView:
    job = state.jobs.get(name)
    if job is not None and who.sees(job.job.tenant):
        return job_view(state, job, service.now_s)
    row = service.store.job(name) if job is None else None
    if row is None or row["view"] is None or not who.sees(row["tenant"]):
        raise NotFoundError(f"there is no job {name!r}")
    return JobView.model_validate_json(row["view"])


@router.get("/jobs")
def jobs(service: Service, who: Viewer, ended: Limit = 100) -> JobList:
    """All jobs of the tenant, and so many of those that have ended."""
    state = service.state
    live = [job_view(state, job, service.now_s) for job in state.jobs.values() if who.sees(job.job.tenant)]
    rows = service.store.ended(None if who.role == "operator" else who.tenant, ended)
    return JobList(jobs=[*live, *(JobView.model_validate_json(row["view"]) for row in rows)])


@router.get("/jobs/{name}")
def job(name: JobName, service: Service, who: Viewer) -> JobView:
    """One job."""
    return _view(service, service.state, name, who)


@router.get("/jobs/{name}/why")
def why(name: JobName, service: Service, who: Viewer) -> Why:
    """Why a job waits, and what would start it."""
    state, found = service.state, _view(service, service.state, name, who)
    if found.phase == "queued" and name in state.jobs:
        others = [one.name for one in state.jobs.values() if not who.sees(one.job.tenant)]
        return Why(name=name, phase=found.phase, why=masked(why_waiting(state, name), others))
    if found.phase == "ended":
        return Why(name=name, phase=found.phase, why=found.why or "it has done its last step")
    where = ", ".join(f"{number} at {site}" for site, number in found.devices.items())
    return Why(name=name, phase=found.phase, why=f"it is {found.phase} on {where}")


@router.get("/jobs/{name}/attempts")
def attempts(name: JobName, service: Service, who: Viewer) -> list[AttemptView]:
    """The starts of a job, the first one first."""
    _view(service, service.state, name, who)
    return [AttemptView.model_validate(row) for row in service.store.attempts(name)]


@router.get("/jobs/{name}/steps")
def steps(name: JobName, service: Service, who: Viewer, attempt: Annotated[int, Query(ge=0)] = 0) -> list[Step]:
    """Steps of an attempt, 500 at most, evenly chosen; 0: the newest one."""
    found = _view(service, service.state, name, who)
    return steps_of(service.launcher, name, attempt or found.attempt)


@router.get("/jobs/{name}/logs")
def logs(
    name: JobName,
    service: Service,
    who: Viewer,
    attempt: Annotated[int, Query(ge=0)] = 0,
    after: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> LogPart:
    """A part of an attempt's log from byte `after` on, or its end; attempt 0: the newest one."""
    found = _view(service, service.state, name, who)
    return log_part(service.launcher, name, attempt or found.attempt, after)


@router.post("/jobs/{name}/cancel")
async def cancel(name: JobName, service: Service, who: Submitter) -> JobView:
    """End a job; what runs writes a checkpoint and leaves."""
    found = await run_in_threadpool(_view, service, service.state, name, who)
    if found.phase != "ended":
        said = f"{who.id} cancels {name}"
        await service.give(Ask(lambda state, now_s: [JobCancelled(now_s, name)] * (name in state.jobs), who=said))
    return await run_in_threadpool(_view, service, service.state, name, who)


@router.get("/what-if")
def questions(service: Service, who: Viewer) -> dict[str, str]:
    """What can be asked: a key for every change, and its words."""
    return changes(service.state, seen_jobs(service.state, who))


@router.post("/what-if")
def what_if(asked: Change, service: Service, who: Viewer) -> list[WhatIf]:
    """Ends of the tenant's jobs if one thing were different. The core plays on with a copy; nothing is changed."""
    state = replace(service.state, now_s=service.now_s)
    found = ends(state, asked.change, seen_jobs(state, who)).items()
    return [
        WhatIf(name=name, end_s=now.end_s, why=now.why, changed_end_s=then.end_s, changed_why=then.why)
        for name, (now, then) in found
    ]


def seen_jobs(state: FleetState, who: Asker) -> list[str]:
    """Names of the jobs in the queue and on devices that `who` may see."""
    return [one.name for one in state.jobs.values() if who.sees(one.job.tenant)]


@router.get("/sites")
def sites(service: Service, who: Viewer) -> list[SiteView]:
    """The sites, with the tenant's own jobs there."""
    state = service.state
    mine = {one.name: one.job.tenant for one in state.jobs.values() if who.sees(one.job.tenant)}
    return site_views(state, service.cluster, mine)


SITE_EVENTS: Final[dict[str, Callable[[float, str, int], Event]]] = {
    "drain": lambda now_s, site, number: DevicesChanged(now_s, site, 0),
    "undrain": DevicesChanged,
    "lost": lambda now_s, site, number: SiteLost(now_s, site),
    "back": lambda now_s, site, number: SiteBack(now_s, site),
}


async def change_site(what: str, site: str, service: Instance, who: Asker) -> None:
    """Do one of `SITE_EVENTS` to a site; NotFoundError if there is none of that name."""
    number = {one.name: one.num_devices for one in service.cluster.sites}.get(site)
    if number is None:
        raise NotFoundError(f"there is no site {site!r}")
    make = SITE_EVENTS[what]
    await service.give(Ask(lambda state, now_s: (make(now_s, site, number),), who=f"{who.id}: {what} {site}"))


def _site_route(what: str, said: str) -> None:
    async def change(site: Annotated[str, Path(max_length=200)], service: Service, who: Operator) -> list[SiteView]:
        await change_site(what, site, service, who)
        return await run_in_threadpool(sites, service, who)

    change.__name__ = what
    router.add_api_route(f"/sites/{{site}}/{what}", change, methods=["POST"], description=said)


_site_route("drain", "Stop what runs at a site, with checkpoints, and start nothing there.")
_site_route("undrain", "Let jobs have a site's devices again.")
_site_route("lost", "A site is gone: its jobs go on elsewhere, from their last checkpoints.")
_site_route("back", "A lost site is there again.")


@router.get("/links")
def links(service: Service, who: Viewer) -> list[LinkView]:
    """The directed links."""
    return link_views(service.state, service.cluster)


@router.put("/links/{link}")
async def change_link(
    link: Annotated[str, Path(max_length=400)], rate: Rate, service: Service, who: Operator
) -> list[LinkView]:
    """Say what a link carries from now on."""
    if link not in service.state.rates:
        raise NotFoundError(f"there is no link {link!r}")
    said = f"{who.id}: {link} carries {rate.bytes_per_s:g} bytes/s"
    await service.give(Ask(lambda state, now_s: (LinkChanged(now_s, link, rate.bytes_per_s),), who=said))
    return await run_in_threadpool(links, service, who)


@router.get("/log")
def entries(
    service: Service, who: Operator, after: Annotated[int, Query(ge=0, le=2**53)] = 0, limit: Limit = 100
) -> list[LogEntry]:
    """Decisions after a number."""
    rows = service.store.entries(after, limit)
    return [LogEntry(entry=json.loads(row.pop("line")), **row) for row in rows]


@router.get("/tokens")
def tokens(service: Service, who: Operator) -> list[TokenView]:
    """All tokens, without their secrets."""
    return [TokenView.model_validate(row) for row in service.store.tokens()]


@router.post("/tokens", status_code=201)
def make_token(wanted: Wanted, service: Service, who: Operator) -> NewToken:
    """Make a token; it is shown this once."""
    token, row = new_token(wanted.role, wanted.tenant, wanted.days)
    service.store.add_token(row)
    return NewToken(token=token, **{key: row[key] for key in TokenView.model_fields})


@router.delete("/tokens/{token_id}", status_code=204)
def remove_token(token_id: Annotated[str, Path(max_length=100)], service: Service, who: Operator) -> None:
    """End a token."""
    if not service.store.remove_token(token_id):
        raise NotFoundError(f"there is no token {token_id!r}")
