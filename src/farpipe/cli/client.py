"""The client of a fleet's service, as the commands use it: where it is, who asks, and errors with their exit codes."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from farpipe.cli.options import AsJson, need_service
from farpipe.core.errors import FarpipeError, InfeasibleError, InputError, RunError, UsageError
from farpipe.core.hosts import keeps_secrets
from farpipe.core.strict import read_text

PATIENCE_S: Final = 20.0
"""Time for which a service that can't answer is asked again: longer than another instance takes to lead."""
ERRORS: Final = {kind.exit_code: kind for kind in (FarpipeError, UsageError, InputError, InfeasibleError, RunError)}


@dataclass(frozen=True)
class Server:
    """Where the service is, who asks, and how the answer is printed."""

    server: Annotated[
        str,
        typer.Option(
            metavar="URL", envvar="FARPIPE_SERVER", help="Service to ask; several with commas: one that answers."
        ),
    ] = "http://127.0.0.1:8470"
    token_file: Annotated[Path, typer.Option(envvar="FARPIPE_TOKEN_FILE", help="Read the token from this file.")] = (
        Path("fleet/operator.token")
    )
    as_json: AsJson = False

    def ask(self, method: str, *path: str, body: Any = None, **query: Any) -> Any:
        """The service's answer as data; a FarpipeError with the problem's exit code where it refuses.

        A request that gets no answer is sent again: the service does nothing twice.
        """
        need_service("this command", "httpx")
        import httpx

        servers = [url.strip().rstrip("/") for url in self.server.split(",")]
        for url in servers:
            _expect_private(url)
        headers = {"authorization": f"Bearer {read_text(self.token_file).strip()}"}
        place = "/v1/" + "/".join(quote(part, safe="") for part in path)
        limit_s, why = time.monotonic() + PATIENCE_S, ""
        while True:
            is_there = len(servers) > 1
            for url in servers:
                try:
                    answer = httpx.request(method, url + place, json=body, params=query, headers=headers, timeout=60)
                except (httpx.TransportError, httpx.InvalidURL) as error:
                    why = f"{url}: no answer: {error}; is `farpipe fleet serve` running there?"
                    continue
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return _data(answer)
                why, is_there = f"{url}: {_problem(answer)['detail']}", True
            if not is_there or time.monotonic() > limit_s:
                raise RunError(why)
            time.sleep(0.5)


def _data(answer: Any) -> Any:
    if answer.is_success:
        return answer.json() if answer.content else None
    problem = _problem(answer)
    raise ERRORS.get(problem.get("exit_code", 1), FarpipeError)(f"{problem['detail']}")


def _problem(answer: Any) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        found = None
    return found if isinstance(found, dict) and "detail" in found else {"detail": f"{answer.status_code} {answer.url}"}


def _expect_private(url: str) -> None:
    """UsageError where a token would cross a network in the clear."""
    if not keeps_secrets(url):
        raise UsageError(
            f"--server {url}: expected https://HOST:PORT, or http:// for this machine: a token is not sent in the clear"
        )
