"""Who looks at the page: a token becomes a cookie that scripts can't read, and forms that other pages can't send."""

import hashlib
import hmac
import secrets
import time
from typing import Annotated, Final, NamedTuple
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from farpipe.core.errors import InputError
from farpipe.service.api import Service
from farpipe.service.auth import Asker, asker, asker_by_hash, hash_of
from farpipe.service.problems import ForbiddenError, UnknownTokenError
from farpipe.service.store import Store

COOKIE: Final = "farpipe_fleet"
LENGTH_S: Final = 12 * 3600.0
"""Time after which one has to log in again."""
MOST_OPEN: Final = 10_000


class Sessions:
    """Open sessions of this instance: a random cookie for the hash of a token, whose end or removal ends it as well.

    The cookie is no token: cookies of one host go to all of its ports.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, float]] = {}
        self._key = secrets.token_bytes(32)

    def open(self, store: Store, token: str) -> str:
        """A new cookie for who has `token`; UnknownTokenError for one that is not known."""
        asker(store, token)
        now_s = time.monotonic()
        over = [name for name, (_, until_s) in [*self._open.items()] if until_s <= now_s]
        for name in over or [*self._open][: len(self._open) + 1 - MOST_OPEN]:
            self._open.pop(name, None)
        cookie = secrets.token_urlsafe(32)
        self._open[hash_of(cookie)] = hash_of(token), now_s + LENGTH_S
        return cookie

    def close(self, cookie: str) -> None:
        """End a session."""
        self._open.pop(hash_of(cookie), None)

    def asker(self, store: Store, cookie: str) -> Asker:
        """Who looks; UnknownTokenError: log in."""
        token, until_s = self._open.get(hash_of(cookie), ("", 0.0))
        if until_s <= time.monotonic():
            raise UnknownTokenError("log in with a token that is known and has not ended")
        return asker_by_hash(store, token)

    def form_key(self, cookie: str) -> str:
        """What every form of this session carries, and nobody else can know."""
        return hmac.new(self._key, cookie.encode(), hashlib.sha256).hexdigest()


class Visitor(NamedTuple):
    """Who looks at the page, and the key of its forms."""

    who: Asker
    form_key: str


async def _visitor(request: Request, service: Service) -> Visitor:
    sessions: Sessions = request.app.state.sessions
    cookie = request.cookies.get(COOKIE, "")
    who = await run_in_threadpool(sessions.asker, service.store, cookie)
    return Visitor(who, sessions.form_key(cookie))


Seen = Annotated[Visitor, Depends(_visitor)]
Form = dict[str, str]


async def _form(request: Request) -> Form:
    """Fields of a form; ForbiddenError where another site's page has sent it."""
    origin = request.headers.get("origin")
    if origin is not None and origin != f"{request.url.scheme}://{request.headers.get('host', '')}":
        raise ForbiddenError("the form is another site's")
    try:
        return dict(parse_qsl((await request.body()).decode(), max_num_fields=20))
    except ValueError:
        raise InputError("the form is damaged; go back and try again") from None


async def _own_form(form: Annotated[Form, Depends(_form)], visitor: Seen) -> Form:
    if not hmac.compare_digest(form.get("form_key", "").encode(), visitor.form_key.encode()):
        raise ForbiddenError("the form is not this session's: load the page again")
    return form


AnyForm = Annotated[Form, Depends(_form)]
OwnForm = Annotated[Form, Depends(_own_form)]
"""A form that this visitor's own page has sent."""
