"""One rank's process: ``python -m farpipe.runtime.rank_main RUN_DIR``, the same under farpipe's launcher and torchrun.

On real sites every rank must be told the address under which the others reach it, for example

    torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 \\
        -m farpipe.runtime.rank_main RUN_DIR --host 10.0.0.1 --allow-plaintext
"""

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from farpipe.errors import FarpipeError, InputError
from farpipe.runtime.launch import reporting_errors
from farpipe.runtime.metrics import RUN_NAME
from farpipe.runtime.run_spec import RunSpec
from farpipe.runtime.train import train_rank
from farpipe.runtime.transport import TransportConfig, connect, rendezvous_from_env
from farpipe.runtime.work import choose_gpu

INTERRUPTED = 130


def main(
    run_dir: Annotated[Path, typer.Argument(help="Directory with run.json; rank 0 writes the results to it.")],
    host: Annotated[str, typer.Option(help="Address of this machine to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port for the first rank of this machine, the next ones take the next; 0: any free.")
    ] = 0,
    advertise_host: Annotated[str | None, typer.Option(help="Address to tell the others, if not --host.")] = None,
    allow_plaintext: Annotated[bool, typer.Option(help="The network is private: messages may go unencrypted.")] = False,
) -> None:
    """Run one rank of the run in RUN_DIR."""
    try:
        with reporting_errors():
            _run_rank(run_dir, host, port, advertise_host, allow_plaintext)
    except FarpipeError as error:
        with contextlib.suppress(OSError):  # the log's disk may be full, which may be the very error
            print(f"rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run_rank(run_dir: Path, host: str, port: int, advertise_host: str | None, allow_plaintext: bool) -> None:
    run = RunSpec.load(run_dir / RUN_NAME)
    settings = run.transport
    config = TransportConfig(
        streams=settings.streams,
        timeout_s=settings.timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        host=host,
        port=port + int(os.environ.get("LOCAL_RANK", "0")) if port else 0,
        advertise_host=advertise_host,
        allow_plaintext=allow_plaintext,
        links=run.links(),
    )
    rendezvous = rendezvous_from_env(settings.connect_timeout_s)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != run.num_ranks:
        raise InputError(f"{run_dir / RUN_NAME} is for {run.num_ranks} ranks, but {world_size} were started")
    if run.device == "cuda":
        choose_gpu()
    gc.freeze()  # collections would otherwise walk over all of torch's objects, now and then in the middle of a step
    with connect(rank, world_size, config, rendezvous) as transport:
        train_rank(run, transport, run_dir)


if __name__ == "__main__":
    typer.run(main)
