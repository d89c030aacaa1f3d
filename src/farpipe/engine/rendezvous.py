"""The rendezvous that torchrun or farpipe's launcher describes in the environment, over torch's key-value store."""

import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from farpipe.core.errors import InputError, RunError
from farpipe.engine.transport.rendezvous import TOKEN_VARIABLE, Rendezvous

LISTENER_VARIABLE: Final = "FARPIPE_MASTER_LISTEN_FD"
Result = TypeVar("Result")


class TorchStore:
    """A torch.distributed.Store as a `Store` of the transport: that it is lost is an OSError."""

    def __init__(self, store: Store) -> None:
        self.torch_store = store

    def set(self, key: str, value: str, /) -> None:
        _reaching(lambda: self.torch_store.set(key, value))

    def get(self, key: str, /) -> bytes:
        return bytes(_reaching(lambda: self.torch_store.get(key)))

    def check(self, keys: list[str], /) -> bool:
        return bool(_reaching(lambda: self.torch_store.check(keys)))


def _reaching(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except dist.DistError as error:
        raise ConnectionError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def rendezvous_from_env(
    timeout_s: float = 30.0, env: Mapping[str, str] = os.environ, store: TorchStore | None = None
) -> Rendezvous:
    """The rendezvous that torchrun or farpipe's own launcher describes in the environment.

    `store`: that of `store_from_env`, which is made if None.
    """
    store, token = store or store_from_env(timeout_s, env), env.get(TOKEN_VARIABLE)
    return Rendezvous(store, _number(env, "RANK"), _number(env, "WORLD_SIZE"), token.encode() if token else None)


def store_from_env(timeout_s: float = 30.0, env: Mapping[str, str] = os.environ) -> TorchStore:
    """The store that torchrun or farpipe's own launcher describes in the environment; once in a process.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch.distributed does. Under torchrun the agent's store is
    used where it offers it. From farpipe's launcher rank 0 inherits the listening socket (FARPIPE_MASTER_LISTEN_FD)
    and all ranks the token (FARPIPE_RUN_TOKEN, which may also be set by hand, the same at all sites). InputError when a
    variable is missing or wrong or the port is taken, RunError when rank 0 can't be reached within `timeout_s`.
    """
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if not rank < world_size:
        raise InputError(f"RANK: must be less than WORLD_SIZE, found {rank} of {world_size}")
    prefix = f"farpipe/{env.get('TORCHELASTIC_RUN_ID', '')}"
    return TorchStore(PrefixStore(prefix, _store(rank, timeout_s, env)))


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
        return TCPStore(
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
