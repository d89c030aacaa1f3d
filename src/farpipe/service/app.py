"""The HTTP application around an instance: errors as problems, sizes, headers, health and metrics."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farpipe import __version__
from farpipe.core.errors import FarpipeError
from farpipe.core.strict import key_path
from farpipe.service.api import Service, Viewer, router
from farpipe.service.instance import Instance
from farpipe.service.page.routes import router as page_router
from farpipe.service.page.session import Sessions
from farpipe.service.problems import MEDIA, STATUS, NotLeaderError, Problem, problem_of
from farpipe.service.submission import MOST_BYTES
from farpipe.service.views import site_views

MOST_BODY: Final = 2 * MOST_BYTES
"""Bytes of a request's body: a job.toml with its signs escaped."""
HEADERS: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
PROBLEMS: Final = sorted({400, 405, 413, *STATUS.values()})
"""Codes with which any route may answer."""
open_router = APIRouter()


def application(instance: Instance, report: Callable[[Path], str] | None = None) -> FastAPI:
    """The application; the instance runs while it does. `report`: the page about the run in a directory, as HTML."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        work = asyncio.create_task(instance.run())
        yield
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    app = FastAPI(title="farpipe fleet", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.instance, app.state.sessions = instance, Sessions()
    app.state.report = report
    app.include_router(router)
    app.include_router(open_router)
    app.include_router(page_router)
    app.add_middleware(Guard)
    app.add_exception_handler(FarpipeError, _problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(SQLAlchemyError, _database)
    app.add_exception_handler(Exception, _bug)
    schema = _documented(app.openapi())
    app.openapi = lambda: schema  # type: ignore[method-assign]
    return app


class Guard:
    """Middleware: bodies up to `MOST_BODY`, and headers that every answer has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BODY:
                raise HTTPException(413, f"the body has more than {MOST_BODY:,} bytes")
            return message

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        return await self._app(scope, limited, headed)


def _answer(problem: Problem, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(problem.model_dump(), problem.status, headers, MEDIA)


async def _problem(request: Request, error: Any) -> JSONResponse:
    problem = problem_of(error)
    return _answer(problem, {"www-authenticate": "Bearer"} if problem.status == 401 else None)


async def _invalid(request: Request, error: Any) -> JSONResponse:
    """What is wrong with a request, and where; never what it held."""
    found = error.errors()[0]
    code = 400 if found["type"] == "json_invalid" else 422
    detail = f"{key_path(found['loc'])}: {found['msg']}"
    return _answer(Problem(title="Input", status=code, detail=detail, exit_code=3))


async def _http(request: Request, error: Any) -> JSONResponse:
    problem = Problem(title="Input", status=error.status_code, detail=f"{error.detail}", exit_code=3)
    return _answer(problem, dict(error.headers or {}))


async def _database(request: Request, error: Any) -> JSONResponse:
    return _answer(problem_of(NotLeaderError("the database can't be reached; try again")))


async def _bug(request: Request, error: Any) -> JSONResponse:
    return _answer(Problem(title="Bug", status=500, detail="a bug in farpipe; the service's log has it", exit_code=1))


class Health(BaseModel):
    """An instance."""

    instance: str
    leader: str
    """The instance that leads; empty: none does, or it is not known."""
    silence: str = ""
    """Reason for which the leader can't see what runs."""


@open_router.get("/health")
def health(service: Service) -> Health:
    """The process lives."""
    return Health(instance=service.owner, leader=service.leader)


@open_router.get("/ready")
def ready(service: Service) -> Health:
    """It can be asked: it leads, or follows one that does."""
    _ = service.state
    return Health(instance=service.owner, leader=service.leader, silence=service.silence)


@open_router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def metrics(service: Service, who: Viewer) -> Response:
    """Figures for Prometheus."""
    registry = CollectorRegistry()
    registry.register(Figures(service))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


class Figures(Collector):
    """Figures of an instance as they are now."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def collect(self) -> Iterator[Metric]:
        """Jobs by phase, devices by site and use, events, and whether it leads and sees what runs."""
        instance, state = self._instance, self._instance.state
        jobs = GaugeMetricFamily("farpipe_jobs", "Jobs that have not ended.", labels=["phase"])
        for phase in ("queued", "starting", "running", "stopping"):
            jobs.add_metric([phase], sum(job.phase == phase for job in state.jobs.values()))
        devices = GaugeMetricFamily("farpipe_devices", "Devices.", labels=["site", "use"])
        for site in site_views(state, instance.cluster, {}):
            devices.add_metric([site.name, "used"], site.num_used)
            devices.add_metric([site.name, "free"], site.num_free)
        yield from (jobs, devices)
        yield CounterMetricFamily("farpipe_events", "Events decided on by this instance.", instance.num_events)
        yield GaugeMetricFamily("farpipe_leads", "1 for the instance that leads.", float(instance.is_leading))
        yield GaugeMetricFamily("farpipe_silent", "1 while it can't see what runs.", float(bool(instance.silence)))


def _documented(schema: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with the problems that every route may answer with, in the place of FastAPI's own."""
    parts = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        parts.pop(name, None)
    parts["Problem"] = Problem.model_json_schema()
    content = {MEDIA: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for path in schema["paths"].values():
        for operation in path.values():
            for code in (*PROBLEMS, 500):
                operation["responses"][str(code)] = {"description": "A problem.", "content": content}
    return schema
