"""REST APIs of what runs a site's jobs: JSON over HTTP, with a token from a file."""

import ssl
from pathlib import Path
from typing import Any

from farpipe.core.document import Table
from farpipe.core.errors import InputError, RunError
from farpipe.core.hosts import keeps_secrets
from farpipe.core.strict import parse_json

LIMIT_S = 30.0
"""Time for an answer."""
NOT_NOW = (401, 403, 408, 429)
"""Codes that say nothing against a request: its token has ended, say, or the server is busy."""


class Rest(Table):
    """Where an API is, and what it is asked with."""

    address: str
    """URL of the server."""
    token_file: str | None = None
    """File with the token, read at each request; None: without one."""
    ca_file: str | None = None
    """Certificates that the server's has to be signed by; None: the usual ones."""
    with_gpus: bool = False
    """Ask for as many GPUs per machine as the plan uses there."""

    def ask(self, method: str, path: str, body: Any = None, known: tuple[int, ...] = (), **query: str) -> Any:
        """What the server answers, None for a code in `known`.

        RunError where it is silent or can't answer now, InputError where it refuses.
        """
        import httpx  # part of the extra [service], which a site does without unless it is asked for this

        headers, place = {}, f"{method} {self.address.rstrip('/')}{path}"
        if self.token_file is not None:
            if not keeps_secrets(self.address):
                raise InputError(f"{self.address}: expected https://, or http:// to this machine: a token is sent")
            headers["authorization"] = f"Bearer {Path(self.token_file).read_text().strip()}"
        trusted = ssl.create_default_context(cafile=self.ca_file)
        try:
            with httpx.Client(verify=trusted, timeout=LIMIT_S, trust_env=False) as client:
                url = place.partition(" ")[2]
                answer = client.request(method, url, json=body, params=query, headers=headers)
        except httpx.HTTPError as error:
            raise RunError(f"{place}: {error or type(error).__name__}") from None
        if answer.status_code in known:
            return None
        if not answer.is_success:
            kind = RunError if answer.status_code in NOT_NOW or answer.status_code >= 500 else InputError
            raise kind(f"{place}: {answer.status_code} {answer.text.strip()[-300:]}")
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return parse_json(answer.text, place) if is_json else answer.text
