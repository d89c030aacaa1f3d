"""What the service refuses, and why, as HTTP says it: status codes and `application/problem+json` (RFC 9457)."""

from typing import Final

from pydantic import BaseModel

from farpipe.core.errors import FarpipeError, InfeasibleError, InputError, RunError

MEDIA: Final = "application/problem+json"


class NotFoundError(InputError):
    """There is no such thing, or none that the asker may see."""


class ConflictError(InputError):
    """The name belongs to something else."""


class TooManyError(InputError):
    """The tenant has as many jobs waiting as it may have."""


class ForbiddenError(InputError):
    """The token's role does not allow it."""


class UnknownTokenError(InputError):
    """No token, or one that is not known or has ended."""


class NotLeaderError(RunError):
    """This instance can't write: another leads, or the database can't be reached."""

    def __init__(self, text: str, leader: str = "") -> None:
        super().__init__(text)
        self.leader = leader


STATUS: Final[dict[type[FarpipeError], int]] = {
    UnknownTokenError: 401,
    ForbiddenError: 403,
    NotFoundError: 404,
    ConflictError: 409,
    TooManyError: 429,
    NotLeaderError: 503,
    InfeasibleError: 422,
    InputError: 422,
}
"""The first that an error is counts."""


class Problem(BaseModel):
    """What went wrong; the exit code is that of a command for the same error."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    exit_code: int
    """Exit code of the command line for it: 3 wrong input, 4 infeasible, 6 try again later, 1 a bug."""
    leader: str = ""
    """Where the instance that leads is, if this one does not."""


def problem_of(error: FarpipeError) -> Problem:
    """The problem that `error` is."""
    kind, status = next(((kind, code) for kind, code in STATUS.items() if isinstance(error, kind)), (RunError, 503))
    title = kind.__name__.removesuffix("Error")
    leader = error.leader if isinstance(error, NotLeaderError) else ""
    return Problem(title=title, status=status, detail=f"{error}", exit_code=error.exit_code, leader=leader)
