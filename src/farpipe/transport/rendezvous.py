"""Meeting of the ranks: every rank says where it listens and learns where the others do."""

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypedDict

from farpipe.errors import InputError, RunError

TOKEN_VARIABLE: Final = "FARPIPE_RUN_TOKEN"
_TOKEN_BYTES: Final = 32
_NUMBER_BYTES: Final = 16
_MEETING: Final = "meeting"
_POLL_S: Final = 0.02


class Meeting(Protocol):
    """Interface to bring the ranks of a run together: a `Rendezvous`, or the two sides of a probe."""

    def introduce(self, introduction: str, timeout_s: float) -> list[str]:
        """Hand in where and what this rank is; everybody's introduction by rank, RunError after `timeout_s`."""

    @property
    def token(self) -> bytes:
        """The secret of the run, the same on all ranks; known once they have met."""


class Store(Protocol):
    """A key-value store that all ranks reach, such as torch's TCPStore; OSError when it is lost."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class _List(TypedDict):
    """Ranks at a meeting: (number, introduction) by rank, and the token unless it is given from outside."""

    ranks: list[tuple[str, str]]
    token: str


class Rendezvous:
    """A meeting of `world_size` ranks over a key-value store.

    The store may outlive a group of ranks: torchrun's agents keep it, and start other ranks when one has failed or a
    machine comes or goes. What they say in the environment does not tell groups apart: TORCHELASTIC_RESTART_COUNT does
    not grow when machines change, and then differs between agents. So rank 0 opens a meeting under a new name, the
    others sign in there, each with a number that it has just drawn, and rank 0 closes the list. Whoever finds its
    number in the list knows that all in it are of now; in the list of an earlier group it is not.

        meeting                 name of the newest meeting
        NAME/rank 1             number and introduction of a rank
        NAME/list               those of all ranks, and the token

    `token` is the secret of the run, by which ranks know each other. None: rank 0 makes one and hands it out through
    the store, and whoever can read the store can read it.
    """

    def __init__(self, store: Store, rank: int, world_size: int, token: bytes | None = None) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._token = token
        self._number = secrets.token_hex(_NUMBER_BYTES)

    def introduce(self, introduction: str, timeout_s: float) -> list[str]:
        """Hand in where and what this rank is; everybody's introduction by rank.

        RunError naming the ranks that did not come within `timeout_s`, and where these are not `world_size` ranks.
        """
        deadline_s = time.monotonic() + timeout_s
        mine = json.dumps([self._number, introduction])
        with self._reaching_store():
            text, missing = self._open(mine, deadline_s) if self._rank == 0 else self._sign_in(mine, deadline_s)
        if text is None:
            raise RunError(f"rank {self._rank} waited {timeout_s:g} s for the others; missing: {_join(missing)}")
        found: _List = json.loads(text)
        if (num_ranks := len(found["ranks"])) != self._world_size:
            raise RunError(
                f"rank {self._rank} is of {self._world_size} ranks and met a group of {num_ranks}; is WORLD_SIZE the "
                "same everywhere?"
            )
        if self._token is None:
            self._token = found["token"].encode()
        return [theirs for _, theirs in found["ranks"]]

    @property
    def token(self) -> bytes:
        """The secret of this run, the same on all ranks; known once they have met.

        InputError where rank 0 has got it from outside and this rank has not.
        """
        if not self._token:
            raise InputError(f"{TOKEN_VARIABLE} is set for rank 0, but not for rank {self._rank}; set it at all sites")
        return self._token

    def _open(self, mine: str, deadline_s: float) -> tuple[str | None, list[str]]:
        """Rank 0's part: the list, which all have signed, or None and who is missing."""
        name = secrets.token_hex(_NUMBER_BYTES)
        self._store.set(_MEETING, name)
        others = [f"rank {rank}" for rank in range(1, self._world_size)]
        while missing := [other for other in others if not self._store.check([f"{name}/{other}"])]:
            if not _wait_before(deadline_s):
                return None, missing
        signed = [mine, *(self._read(f"{name}/{other}") for other in others)]
        token = "" if self._token else secrets.token_hex(_TOKEN_BYTES)
        text = json.dumps(_List(ranks=[_signature(line) for line in signed], token=token))
        self._store.set(f"{name}/list", text)
        return text, []

    def _sign_in(self, mine: str, deadline_s: float) -> tuple[str | None, list[str]]:
        """Another rank's part. The meeting may be that of an earlier group until rank 0 has opened its own."""
        name = ""
        while True:
            if self._store.check([_MEETING]) and (newest := self._read(_MEETING)) != name:
                name = newest
                self._store.set(f"{name}/rank {self._rank}", mine)
            if name and self._store.check([f"{name}/list"]) and self._number in (text := self._read(f"{name}/list")):
                return text, []
            if not _wait_before(deadline_s):
                return None, self._missing(name)

    def _missing(self, name: str) -> list[str]:
        """Ranks that have not signed in, as seen by another rank than 0."""
        others = [f"rank {rank}" for rank in range(1, self._world_size)] if name else []
        return [other for other in others if not self._store.check([f"{name}/{other}"])] or ["rank 0"]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode(errors="replace")

    @contextmanager
    def _reaching_store(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"rank {self._rank}: lost the meeting point of the ranks: {error}") from None


def _wait_before(deadline_s: float) -> bool:
    """Wait a little; False if it is too late. A call that blocks in the store could not be ended with Ctrl-C."""
    if time.monotonic() > deadline_s:
        return False
    time.sleep(_POLL_S)
    return True


def _signature(line: str) -> tuple[str, str]:
    """Number and introduction; something else than a rank's own makes sense to nobody, see `introduction`."""
    try:
        number, introduction = json.loads(line)
        return str(number), str(introduction)
    except (ValueError, TypeError):
        return "", line


def _join(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
