"""How ranks find each other: every rank says where it listens and learns where the others do."""

import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol

import torch.distributed as dist

from farpipe.errors import InputError, RunError

TOKEN_VARIABLE: Final = "FARPIPE_RUN_TOKEN"
LISTENER_VARIABLE: Final = "FARPIPE_MASTER_LISTEN_FD"
_TOKEN_BYTES: Final = 32
_POLL_S: Final = 0.02


class Store(Protocol):
    """What is needed of a torch.distributed.Store."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Rendezvous:
    """A meeting of `world_size` ranks over a key-value store.

    `token` is the secret of the run, by which ranks know each other. None: rank 0 makes one and hands it out through
    the store, and whoever can read the store can read it.
    """

    def __init__(self, store: Store, rank: int, world_size: int, token: bytes | None = None) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._token = token

    def introduce(self, introduction: str, timeout_s: float) -> list[str]:
        """Hand in where and what this rank is; everybody's introduction by rank.

        RunError naming the ranks that did not come within `timeout_s`.
        """
        self._set(f"rank {self._rank}", introduction)
        return self._get([f"rank {rank}" for rank in range(self._world_size)], timeout_s)

    def token(self, timeout_s: float) -> bytes:
        """The secret of this run, the same on all ranks."""
        if self._token is None:
            if self._rank == 0:
                self._set("token", secrets.token_hex(_TOKEN_BYTES))
            self._token = self._get(["token"], timeout_s)[0].encode()
        return self._token

    def _set(self, key: str, value: str) -> None:
        with self._reaching_store():
            self._store.set(key, value)

    def _get(self, keys: list[str], timeout_s: float) -> list[str]:
        """The values of `keys`, asked for again and again: a call that blocks could not be ended with Ctrl-C."""
        deadline_s = time.monotonic() + timeout_s
        with self._reaching_store():
            while missing := [key for key in keys if not self._store.check([key])]:
                if time.monotonic() > deadline_s:
                    raise RunError(
                        f"rank {self._rank} waited {timeout_s:g} s for the others; missing: {_join(missing)}"
                    )
                time.sleep(_POLL_S)
            return [self._store.get(key).decode(errors="replace") for key in keys]

    @contextmanager
    def _reaching_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise RunError(f"rank {self._rank}: lost the meeting point of the ranks: {_first_line(error)}") from None


def _join(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def rendezvous_from_env(timeout_s: float = 30.0, env: Mapping[str, str] = os.environ) -> Rendezvous:
    """The rendezvous that torchrun or farpipe's own launcher describes in the environment.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch.distributed does. Under torchrun the agent's store is
    used where it offers it; every restart meets under its own prefix. From farpipe's launcher rank 0 inherits the
    listening socket (FARPIPE_MASTER_LISTEN_FD) and all ranks the token (FARPIPE_RUN_TOKEN, which may also be set by
    hand, the same at all sites). InputError when a variable is missing or wrong or the port is taken, RunError when
    rank 0 can't be reached within `timeout_s`.
    """
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if not rank < world_size:
        raise InputError(f"RANK: must be less than WORLD_SIZE, found {rank} of {world_size}")
    prefix = f"farpipe/{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
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
