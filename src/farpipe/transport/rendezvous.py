"""How ranks find each other: every rank says where it listens and learns where the others do."""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol, TypedDict

import torch.distributed as dist

from farpipe.errors import InputError, RunError

TOKEN_VARIABLE: Final = "FARPIPE_RUN_TOKEN"
LISTENER_VARIABLE: Final = "FARPIPE_MASTER_LISTEN_FD"
_TOKEN_BYTES: Final = 32
_NUMBER_BYTES: Final = 16
_MEETING: Final = "meeting"
_POLL_S: Final = 0.02


class Store(Protocol):
    """What is needed of a torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class _List(TypedDict):
    """Who has come to a meeting: (number, introduction) by rank, and the token unless it is given from outside."""

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
        """Who has not signed in, as seen by another rank than 0."""
        others = [f"rank {rank}" for rank in range(1, self._world_size)] if name else []
        return [other for other in others if not self._store.check([f"{name}/{other}"])] or ["rank 0"]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode(errors="replace")

    @contextmanager
    def _reaching_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise RunError(f"rank {self._rank}: lost the meeting point of the ranks: {_first_line(error)}") from None


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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def rendezvous_from_env(timeout_s: float = 30.0, env: Mapping[str, str] = os.environ) -> Rendezvous:
    """The rendezvous that torchrun or farpipe's own launcher describes in the environment.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch.distributed does. Under torchrun the agent's store is
    used where it offers it. From farpipe's launcher rank 0 inherits the listening socket (FARPIPE_MASTER_LISTEN_FD)
    and all ranks the token (FARPIPE_RUN_TOKEN, which may also be set by hand, the same at all sites). InputError when a
    variable is missing or wrong or the port is taken, RunError when rank 0 can't be reached within `timeout_s`.
    """
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if not rank < world_size:
        raise InputError(f"RANK: must be less than WORLD_SIZE, found {rank} of {world_size}")
    prefix = f"farpipe/{env.get('TORCHELASTIC_RUN_ID', '')}"
    token = env.get(TOKEN_VARIABLE)
    store = dist.PrefixStore(prefix, _store(rank, timeout_s, env))  # type: ignore[attr-defined,arg-type]
    return Rendezvous(store, rank, world_size, token.encode() if token else None)


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name)
    if text is None:
        raise InputError(f"{name} is not in the environment; start the ranks with torchrun or farpipe's launcher")
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{name}: expected a whole number, found {text!r}")
    return int(text)


def _store(rank: int, timeout_s: float, env: Mapping[str, str]) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT, served by rank 0 unless torchrun's agent does."""
    host, port = env.get("MASTER_ADDR", ""), _number(env, "MASTER_PORT")
    serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not host:
        raise InputError("MASTER_ADDR is not in the environment; start the ranks with torchrun or farpipe's launcher")
    listener = int(env[LISTENER_VARIABLE]) if serves and LISTENER_VARIABLE in env else None
    if serves and listener is None:
        _check_port_is_free(port)
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except (dist.DistError, ValueError) as error:
        where = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
        reason = _first_line(error)
        raise RunError(f"rank {rank}: no meeting point at {where} within {timeout_s:g} s: {reason}") from None


def _check_port_is_free(port: int) -> None:
    """torch.distributed would say it in many more words."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise InputError(
            f"MASTER_PORT {port} can't be listened on: {error.strerror}; stop what uses it or choose another port"
        ) from None
