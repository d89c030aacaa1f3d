"""The server behind ``farpipe explore``; a module of its own, for what it needs takes 20 ms to import."""

import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from farpipe.core.spec import Job
from farpipe.planning.explain.what_if import answer_at, dials_of
from farpipe.report.page import policy, render
from farpipe.report.views import RunReport
from farpipe.report.what_if import answer_data, what_if_data

HOST: Final = "127.0.0.1"
PORT: Final = 8642
"""Preferred port; where it is taken, any free one."""


def server_of(job: Job) -> ThreadingHTTPServer:
    """A server of the page of `job` and of its answers, for this machine alone."""
    dials, one_at_a_time = dials_of(job, every_site=True), Lock()
    sites = ", ".join(f"{site.name} ({site.num_devices} {site.device.name})" for site in job.cluster.sites)
    page = render(RunReport(f"{job.model.name}: what if", (), sites, what_if=what_if_data(dials, None)))

    def answer(at: Sequence[int], is_searched: bool) -> dict[str, Any]:
        with one_at_a_time:
            return answer_data(answer_at(job, dials, at, is_searched=is_searched))

    sizes = [len(dial.values) for dial in dials]
    handler = type(
        "Handler", (_Handler,), {"page": page, "policy": policy(True), "sizes": sizes, "answer": staticmethod(answer)}
    )
    try:
        return ThreadingHTTPServer((HOST, PORT), handler)
    except OSError:
        return ThreadingHTTPServer((HOST, 0), handler)


class _Handler(BaseHTTPRequestHandler):
    """Serves one page, and answers at settings that are numbers within the dials' sizes."""

    page: str
    policy: str
    sizes: Sequence[int]
    answer: Callable[[Sequence[int], bool], dict[str, Any]]

    def do_GET(self) -> None:
        """The page or an answer; a request under another name than this machine's is refused."""
        where = urlsplit(self.path)
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        elif where.path == "/":
            self._send("text/html", self.page)
        elif where.path == "/answer" and (asked := self._asked(where.query)) is not None:
            self._send("application/json", json.dumps(type(self).answer(*asked)))
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _asked(self, query: str) -> tuple[list[int], bool] | None:
        given = parse_qs(query)
        words = given.get("at", [""])[0].split(",")
        if len(words) != len(self.sizes) or not all(word.isascii() and word.isdecimal() for word in words):
            return None
        at = [int(word) for word in words]
        is_there = all(index < size for index, size in zip(at, self.sizes, strict=True))
        return (at, given.get("search") == ["1"]) if is_there else None

    def _send(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(HTTPStatus.OK)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        headers |= {"Content-Security-Policy": self.policy, "X-Content-Type-Options": "nosniff"}
        headers |= {"Cache-Control": "no-store"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing of requests."""
