"""Tokens: 256 random bits, of which the database has the hash alone, with a role, a tenant and an end."""

import hashlib
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from farpipe.core.strict import write_text
from farpipe.service.problems import ForbiddenError, UnknownTokenError
from farpipe.service.store import Row, Store

Role = Literal["viewer", "submitter", "operator"]
ROLES: Final = get_args(Role)
"""Each may do what those before it may."""
TOKEN_NAME: Final = "operator.token"
"""File of the first token, which the first instance writes."""
FIRST_DAYS: Final = 365


@dataclass(frozen=True)
class Asker:
    """Who asks: a token's role and tenant."""

    id: str
    role: Role
    tenant: str

    def expect(self, role: Role) -> None:
        """ForbiddenError for who may do less than `role`."""
        if ROLES.index(self.role) < ROLES.index(role):
            raise ForbiddenError(f"this needs the role {role}; the token's is {self.role}")

    def sees(self, tenant: str) -> bool:
        """True if the jobs of `tenant` are its business: an operator's are all."""
        return self.role == "operator" or tenant == self.tenant


def new_token(role: Role, tenant: str, days: int) -> tuple[str, Row]:
    """A token and its row in the database."""
    token = secrets.token_urlsafe(32)
    until_s = time.time() + days * 86400.0
    row = {"id": secrets.token_hex(4), "sha256": _hash(token), "role": role, "tenant": tenant, "until_s": until_s}
    return token, row


def asker(store: Store, token: str) -> Asker:
    """Who has `token`; UnknownTokenError: nobody, or not any more."""
    row = store.token(_hash(token)) if token else None
    if row is None:
        raise UnknownTokenError("send a token that is known and has not ended: Authorization: Bearer TOKEN")
    return Asker(row["id"], row["role"], row["tenant"])


def make_first_token(store: Store, folder: Path) -> None:
    """Write a token for an operator into `folder` where there is none at all."""
    if not store.tokens():
        token, row = new_token("operator", "operators", FIRST_DAYS)
        write_text(folder / TOKEN_NAME, token + "\n", private=True)
        store.add_token(row)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
