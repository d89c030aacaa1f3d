"""CPU of bytes beside the plain thing: farpipe's transport and a socket, the torch backend and gloo. Prints JSON.

    python -m benchmarks.transport.cpu_per_gb [ROUNDS [ROWS]]

Two processes over loopback, messages of LARGE_BYTES. Every row (or those whose name has ROWS in it) is measured ROUNDS
times (5), all in turn; its figure is the least CPU time (s) of a round per GB sent, of all threads of a process.
`socket`, `ssl`: Python's own, into one buffer; `transport`, `transport_tls`: farpipe's over one stream, into memory of
its own. Of send and receive there are two figures, sender and receiver; of `all_reduce` the mean of both ranks, per GB
of the tensor. `threads`: how many more the backend has with 500 receives of 500 tags posted.
"""

import itertools
import json
import os
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LARGE_BYTES = 64 << 20
NUM_LARGE = 6
NUM_TAGS = 500
SITE = "here"


def main() -> None:
    from torch.distributed import TCPStore

    from farpipe.engine.launch.launcher import launch
    from farpipe.engine.transport.security.authority import init, issue

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        init(Path(folder) / "certs")
        issue(Path(folder) / "certs", SITE)
        command = [sys.executable, __file__, folder, str(store.port), *(sys.argv[1:] or ["5"])]
        launch(lambda _: command, 2, log_dir=Path(folder), env={"GLOO_SOCKET_IFNAME": "lo"})
        sender, receiver = (json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2))
    threads = sender.pop("threads")
    print(
        json.dumps({"s_per_gb": {row: figures(row, sender[row], receiver[row]) for row in sender}, "threads": threads})
    )


def figures(row: str, sender: float, receiver: float) -> list[float]:
    """What is shown of a row."""
    return [round((sender + receiver) / 2, 3)] if "all_reduce" in row else [round(sender, 3), round(receiver, 3)]


def run_rank(folder: Path, port: int, rounds: int, names: str = "") -> None:
    """One side: rank 0 sends, rank 1 receives."""
    import torch
    import torch.distributed as dist

    import farpipe.torch

    assert farpipe.torch
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=2)
    rows = wire_rows(rank, store, folder) | group_rows(rank, "gloo", dist.group.WORLD)
    group = dist.new_group(backend="farpipe")
    rows |= group_rows(rank, "farpipe", group)
    rows = {name: run for name, run in rows.items() if names in name}
    least = dict.fromkeys(rows, float("inf"))
    for _ in range(rounds):
        for name, run in rows.items():
            dist.barrier()
            begin_s = time.process_time()
            run()
            least[name] = min(least[name], time.process_time() - begin_s)
    found: dict[str, Any] = {name: seconds / (NUM_LARGE * LARGE_BYTES / 1e9) for name, seconds in least.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found | {"threads": threads_of_tags(rank, group)}))
    dist.barrier()
    dist.destroy_process_group(group)


def wire_rows(rank: int, store: Any, folder: Path) -> dict[str, Callable[[], None]]:
    """Python's sockets and farpipe's transport, without and with TLS."""
    from farpipe.engine.transport.security.tls import TlsFiles

    tls = TlsFiles.find(folder / "certs", SITE)
    rows = {"socket": by_socket(rank, connected(rank, store, "socket"))}
    rows["transport"] = by_transport(rank, store, None)
    rows["ssl"] = by_socket(rank, connected(rank, store, "ssl", tls.context(server=rank == 0)))
    rows["transport_tls"] = by_transport(rank, store, tls)
    return rows


def connected(rank: int, store: Any, name: str, context: ssl.SSLContext | None = None) -> socket.socket:
    """A connection between both, within TLS if there is a `context`."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set(name, str(server.getsockname()[1]))
            sock, _ = server.accept()
    else:
        sock = socket.create_connection(("127.0.0.1", int(store.get(name))))
    return sock if context is None else context.wrap_socket(sock, server_side=rank == 0)


def by_socket(rank: int, sock: socket.socket) -> Callable[[], None]:
    data = bytearray(LARGE_BYTES)

    def run() -> None:
        for _ in range(NUM_LARGE):
            if rank == 0:
                sock.sendall(data)
                continue
            view = memoryview(data)
            while view:
                view = view[sock.recv_into(view) :]

    return run


def by_transport(rank: int, store: Any, tls: Any) -> Callable[[], None]:
    from torch.distributed import PrefixStore

    from farpipe.engine.executor.staging import message_memory
    from farpipe.engine.rendezvous import TorchStore
    from farpipe.engine.transport import Rendezvous, Tag, TransportConfig, connect

    meeting = Rendezvous(TorchStore(PrefixStore(f"transport {tls is None}", store)), rank, 2, b"benchmark")
    config = TransportConfig(streams=1, tls=tls, sites=(SITE,) * 2)
    transport = connect(rank, 2, config, meeting, allocate=message_memory("cpu"))
    data, rounds = bytes(LARGE_BYTES), itertools.count()

    def run() -> None:
        step = next(rounds)
        for number in range(NUM_LARGE):
            if rank == 0:
                transport.send(1, "forward", Tag(step, 0, number), data)
            else:
                transport.receive(0, "forward", Tag(step, 0, number), waiting_for="a message")
        transport.exchange(f"end {step}", b"", waiting_for="the other side")

    return run


def group_rows(rank: int, name: str, group: Any) -> dict[str, Callable[[], None]]:
    """Collectives and messages of a group of torch."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(LARGE_BYTES // 4)

    def message() -> None:
        for _ in range(NUM_LARGE):
            if rank == 0:
                dist.isend(tensor, 1, group=group).wait()
            else:
                dist.recv(tensor, 0, group=group)

    def reduce() -> None:
        for _ in range(NUM_LARGE):
            dist.all_reduce(tensor, group=group)

    return {f"{name} send, receive": message, f"{name} all_reduce": reduce}


def threads_of_tags(rank: int, group: Any) -> int:
    import torch
    import torch.distributed as dist

    before, tensors = threading.active_count(), torch.zeros(NUM_TAGS, 4)
    works = [dist.irecv(tensors[tag], 1 - rank, group=group, tag=tag) for tag in range(NUM_TAGS)]
    found = threading.active_count() - before
    for tag in range(NUM_TAGS):
        dist.send(tensors[tag].clone(), 1 - rank, group=group, tag=tag)
    for work in works:
        work.wait()
    return found


if __name__ == "__main__":
    if len(sys.argv) > 3:
        run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    else:
        main()
