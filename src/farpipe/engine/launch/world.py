"""All ranks of a run, of which some run on this machine, and the environment that they get."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """All ranks of a run, some of them here."""

    ranks: Sequence[int]
    """Those that run here."""
    num_processes: int
    """Of the whole run."""
    master: tuple[str, int]
    """Host and port of the rendezvous, which rank 0 serves."""
    token: str
    """Secret by which ranks know each other."""
    listener: socket.socket | None
    """The rendezvous' socket, where rank 0 runs."""

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Environment variables of all ranks here, as torchrun gives them; RANK and LOCAL_RANK are left out."""
        cores = len(os.sched_getaffinity(0))
        defaults = {"OMP_NUM_THREADS": str(max(1, cores // len(self.ranks))), "PYTHONUNBUFFERED": "1"}
        host, port = self.master
        return {
            **defaults,
            **{name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_")},
            "WORLD_SIZE": str(self.num_processes),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "FARPIPE_RUN_TOKEN": self.token,
            **({} if self.listener is None else {"FARPIPE_MASTER_LISTEN_FD": str(self.listener.fileno())}),
        }
