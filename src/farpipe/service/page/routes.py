"""Routes of the page: views for who has logged in, and actions with the checks of the API."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import cache
from importlib.resources import files
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup as Safe

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.strict import validate
from farpipe.fleet.replacing import replace
from farpipe.report.page import described, draw_table, page_css, policy, source_of
from farpipe.report.tables import TableView
from farpipe.service import api
from farpipe.service.api import SITE_EVENTS, JobName, Service
from farpipe.service.auth import ROLES, Asker
from farpipe.service.folder import RUN_NAME
from farpipe.service.instance import Instance
from farpipe.service.page import tables
from farpipe.service.page.figures import DAY_S, holdings, step_charts
from farpipe.service.page.session import COOKIE, LENGTH_S, AnyForm, Form, OwnForm, Seen, Sessions, Visitor
from farpipe.service.problems import NotFoundError, NotLeaderError, UnknownTokenError, problem_of
from farpipe.service.reading import log_part
from farpipe.service.views import Submission
from farpipe.service.what_if import changes, ends

VIEWS: Final = (
    ("/", "Jobs"),
    ("/submit", "Submit"),
    ("/sites", "Sites and links"),
    ("/what-if", "What if"),
    ("/accounts", "Accounts"),
)
MOST_WHY: Final = 20
"""Waiting jobs that the list explains; the policy is asked for each."""
TAIL_LINES: Final = 5
MOST_TAILS: Final = 5
"""Newest attempts whose last lines are shown."""
MOST_ACCOUNTS: Final = 1000
"""Ended jobs that the accounts count."""
MOST_HOLDINGS: Final = 200
MOST_ASKED: Final = 100
STREAM_S: Final = 30.0
"""Length of one stream of changes; the browser asks for the next one by itself."""
POLL_S: Final = 0.5
MOVES_S: Final = 5.0
"""Interval at which what runs counts as changed: it has come further."""
TEMPLATES: Final = Environment(
    loader=PackageLoader("farpipe.service.page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


class PageRoute(APIRoute):
    """A route whose refusals are pages too; who has not logged in gets to do so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of FastAPI, with refusals as pages."""
        handle = super().get_route_handler()

        async def shown(request: Request) -> Response:
            try:
                return await handle(request)
            except UnknownTokenError:
                return RedirectResponse("/login", 303)
            except FarpipeError as error:
                problem = problem_of(error)
                return page("problem.html", None, problem.status, problem=problem.detail)
            except RequestValidationError:
                return page("problem.html", None, 404, problem="there is no such page")

        return shown


router = APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)


@cache
def assets() -> tuple[Safe, Safe, str]:
    """Style, script, and what the browser lets the page do: no more than these two, told by their hashes."""
    folder = files("farpipe.service.page")
    css = page_css() + (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    allowed = (
        f"default-src 'none'; style-src {source_of(css)}; script-src {source_of(script)}; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'; img-src data:"
    )
    return Safe(css), Safe(script), allowed


def page(name: str, visitor: Visitor | None, status: int = 200, here: str = "", **values: Any) -> HTMLResponse:
    """A page from its template. All text is escaped but what `tag` and the templates have made."""
    css, script, allowed = assets()
    who = visitor.who if visitor else None
    key = Safe('<input type="hidden" name="form_key" value="{}">').format(visitor.form_key if visitor else "")
    text = TEMPLATES.get_template(name).render(
        {"problem": "", **values},
        css=css,
        script=script,
        who=who,
        may={role: who is not None and ROLES.index(who.role) >= ROLES.index(role) for role in ROLES},
        key=key,
        views=VIEWS,
        here=here,
        table=_table,
    )
    headers = {"content-security-policy": allowed, "referrer-policy": "same-origin"}
    return HTMLResponse(text, status, headers)


def _table(view: TableView, *, captioned: bool = False) -> Safe:
    return Safe(draw_table(view, captioned=captioned))


@router.get("/login")
def ask_for_token() -> HTMLResponse:
    """Ask for a token."""
    return page("login.html", None)


@router.post("/login")
def login(request: Request, service: Service, form: AnyForm) -> Response:
    """A session for who has a token."""
    sessions: Sessions = request.app.state.sessions
    try:
        cookie = sessions.open(service.store, form.get("token", "").strip())
    except UnknownTokenError:
        return page("login.html", None, 401, problem="The token is not known, or has ended.")
    answer = RedirectResponse("/", 303)
    secure = request.url.scheme == "https"
    answer.set_cookie(COOKIE, cookie, int(LENGTH_S), httponly=True, samesite="strict", secure=secure)
    return answer


@router.post("/logout")
def logout(request: Request, form: OwnForm) -> Response:
    """End the session."""
    request.app.state.sessions.close(request.cookies.get(COOKIE, ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE)
    return answer


@router.get("/")
def jobs(service: Service, visitor: Seen) -> HTMLResponse:
    """What needs attention, and all jobs."""
    found, state, now_s = api.jobs(service, visitor.who).jobs, service.state, service.now_s
    waiting = [job.name for job in found if job.phase == "queued"]
    why = {name: _why(service, name, visitor.who) for name in waiting[:MOST_WHY]}
    why |= dict.fromkeys(waiting[MOST_WHY:], "its own page says why")
    disk = shutil.disk_usage(service.root)
    attention = [*tables.of_fleet(state, api.sites(service, visitor.who), service.silence, disk.free / disk.total)]
    attention += [line for job in found for line in tables.of_job(job, state, now_s)]
    live, ended = ([job for job in found if (job.phase == "ended") == is_over] for is_over in (False, True))
    views = [*([tables.live_jobs(live, why)] if live else []), *([tables.ended_jobs(ended)] if ended else [])]
    return page("jobs.html", visitor, here="/", attention=attention, tables=views)


def _why(service: Instance, name: str, who: Asker) -> str:
    return tables.in_words(api.why(name, service, who).why)


@router.get("/jobs/{name}")
def job(name: JobName, request: Request, service: Service, visitor: Seen) -> HTMLResponse:
    """One job: how it goes, its attempts, steps and log."""
    who = visitor.who
    found, attempts = api.job(name, service, who), api.attempts(name, service, who)
    newest = [one.attempt for one in attempts[: -MOST_TAILS - 1 : -1]]
    steps = next((got for attempt in newest if (got := api.steps(name, service, who, attempt))), [])
    log, quote_s = api.logs(name, service, who), _quote_s(service, name)
    last = {
        one.attempt: _tail(log_part(service.launcher, name, one.attempt, None).text)
        for one in attempts[-MOST_TAILS:]
        if one.ended_s is not None
    }
    link = f"/jobs/{name}/report?attempt=" if request.app.state.report else ""
    return page(
        "job.html",
        visitor,
        job=found,
        why=_why(service, name, who),
        figures=Safe(described(tables.key_figures(found, steps, quote_s), name)),
        attempts=tables.attempts_table(attempts, last, link),
        charts=[Safe(chart) for chart in step_charts(steps, quote_s)],
        steps=tables.steps_table(steps),
        log=log,
    )


@router.get("/jobs/{name}/report")
def report(name: JobName, request: Request, service: Service, visitor: Seen, attempt: int) -> HTMLResponse:
    """The report of an attempt: its plan, and its timeline predicted above measured."""
    known = [one.attempt for one in api.attempts(name, service, visitor.who)]
    run_dir = service.root / name / f"{attempt}" / RUN_NAME
    if request.app.state.report is None or attempt not in known or not run_dir.exists():
        raise NotFoundError(f"attempt {attempt} of {name!r} has no run here (yet)")
    headers = {"content-security-policy": f"{policy()}; base-uri 'none'; frame-ancestors 'none'"}
    return HTMLResponse(request.app.state.report(run_dir), headers=headers)


def _quote_s(service: Instance, name: str) -> float | None:
    """The planner's time of a step where the job is, which its own reports have replaced in the state."""
    state = service.state
    one = state.jobs.get(name)
    if one is None or one.placement is None:
        return None
    quote = state.world.quotes.placement(one.job.kind, one.placement.devices, state.rates)
    return quote.step_s if quote else None


def _tail(text: str) -> str:
    return "\n".join(text.rstrip("\n").split("\n")[-TAIL_LINES:])


@router.get("/sites")
def sites(service: Service, visitor: Seen) -> HTMLResponse:
    """Sites and links."""
    return page(
        "sites.html",
        visitor,
        here="/sites",
        sites=tables.sites_table(api.sites(service, visitor.who)),
        links=tables.links_table(api.links(service, visitor.who)),
    )


@router.get("/submit")
def ask_for_job(visitor: Seen) -> HTMLResponse:
    """The form for a job."""
    return page("submit.html", visitor, here="/submit", form={})


@router.post("/submit")
async def submit(service: Service, visitor: Seen, form: OwnForm) -> Response:
    """Submit a job; what is wrong with it is said beside what was filled in."""
    visitor.who.expect("submitter")
    try:
        numbers = {key: _number(form, key) for key in ("min_devices", "max_devices") if form.get(key)}
        wanted = validate(Submission, {"name": form.get("name", ""), "job": form.get("job", ""), **numbers}, "the form")
        await api.submit(wanted, service, visitor.who, Response())
    except FarpipeError as error:
        return page("submit.html", visitor, problem_of(error).status, "/submit", form=form, problem=f"{error}")
    return RedirectResponse(f"/jobs/{wanted.name}", 303)


def _number(form: Form, key: str) -> int:
    if not form[key].strip().isascii() or not form[key].strip().isdigit():
        raise InputError(f"{key}: expected a whole number, found {form[key][:40]!r}")
    return int(form[key])


@router.get("/what-if")
def what_if(service: Service, visitor: Seen, change: str = "") -> HTMLResponse:
    """Ends of jobs if one thing were different; nothing is changed."""
    state = service.state
    mine = api.seen_jobs(state, visitor.who)
    known = changes(state, mine)
    shown = ends(replace(state, now_s=service.now_s), change, mine) if change else {}
    return page("what_if.html", visitor, here="/what-if", known=known, change=change, found=tables.what_if_table(shown))


@router.get("/accounts")
def accounts(service: Service, visitor: Seen) -> HTMLResponse:
    """Money, energy and carbon; who had which devices; who did what."""
    who, now_s = visitor.who, service.now_s
    found = api.jobs(service, who, MOST_ACCOUNTS).jobs
    mine, rows = {one.name for one in found}, service.store.attempts_since(now_s - DAY_S, MOST_HOLDINGS)
    held = [one for one in rows if one["job"] in mine]
    asked = service.store.asked(MOST_ASKED) if who.role == "operator" else []
    return page(
        "accounts.html",
        visitor,
        here="/accounts",
        accounts=tables.accounts_table(found),
        picture=Safe(holdings(held, now_s)) if held else "",
        held=tables.holdings_table(held, now_s),
        asked=tables.asked_table(asked),
    )


@router.post("/act")
async def act(service: Service, visitor: Seen, form: OwnForm) -> Response:
    """Do what a form asks, with the roles that the API wants for it."""
    what, name, who = form.get("what", ""), form.get("name", ""), visitor.who
    if what == "cancel":
        who.expect("submitter")
        await api.cancel(name, service, who)
        return RedirectResponse(f"/jobs/{name}", 303)
    if what in SITE_EVENTS:
        who.expect("operator")
        await api.change_site(what, name, service, who)
        return RedirectResponse("/sites", 303)
    raise InputError("the form does not say what to do")


@router.get("/changes")
def stream(service: Service, visitor: Seen) -> StreamingResponse:
    """Server-sent events: ``changed``, at most twice a second."""
    return StreamingResponse(_changes(service), media_type="text/event-stream")


async def _changes(service: Instance) -> AsyncIterator[str]:
    seen, told_s, loop = "", 0.0, asyncio.get_running_loop()
    end_s = loop.time() + STREAM_S
    yield "retry: 1000\n\n"
    while loop.time() < end_s:
        now, moves = _known(service)
        if now != seen or (moves and loop.time() > told_s + MOVES_S):
            seen, told_s = now, loop.time()
            yield "event: changed\ndata: \n\n"
        await asyncio.sleep(POLL_S)


def _known(service: Instance) -> tuple[str, bool]:
    """What tells one moment from another, and whether anything moves by itself."""
    try:
        state = service.state
    except NotLeaderError as error:
        return f"{error}", False
    moves = any(job.phase != "queued" for job in state.jobs.values())
    return f"{service.store.number} {service.leader} {service.silence}", moves
