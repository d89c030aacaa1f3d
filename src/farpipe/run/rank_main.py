"""One rank's process: ``python -m farpipe.run.rank_main RUN_DIR``, the same under farpipe's launcher and torchrun.

On real sites every rank must be told the address under which the others reach it, for example

    torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 \\
        -m farpipe.run.rank_main RUN_DIR --host 10.0.0.1 --certs certs/zurich
"""

import contextlib
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from farpipe.control.chunk_planning import ChunkPlanning
from farpipe.control.watch import Watch
from farpipe.errors import DivergedError, FarpipeError, InputError, RunError, RunInterruptedError, RunStoppedError
from farpipe.processes import die_with_agent
from farpipe.run.reports import reporting_errors
from farpipe.runtime.channels import open_channels
from farpipe.runtime.commands import sigterm_asks
from farpipe.runtime.figures.metrics import RUN_NAME
from farpipe.runtime.make_stage import choose_gpu
from farpipe.runtime.message_memory import message_memory
from farpipe.runtime.rendezvous import rendezvous_from_env
from farpipe.runtime.run_spec import RunSpec
from farpipe.runtime.tensor_peers import TensorPeers
from farpipe.runtime.train import train_rank
from farpipe.transport import TransportConfig, connect
from farpipe.transport.security.tls import TlsFiles

INTERRUPTED = 130
REPLAN_HEADROOM = 2.0
"""Of the rates that sending keeps to: whoever looks for a better order wants to see when a link gets faster.

Without any limit messages overrun the queue of a link that has become slower, and steps took a quarter longer.
"""


def main(
    run_dir: Annotated[Path, typer.Argument(help="Directory with run.json; rank 0 writes the results to it.")],
    host: Annotated[str, typer.Option(help="Address of this machine to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port for the first rank of this machine, the next ones take the next; 0: any free.")
    ] = 0,
    advertise_host: Annotated[str | None, typer.Option(help="Address to tell the others, if not --host.")] = None,
    certs: Annotated[
        Path | None, typer.Option(help="This site's folder from `farpipe certs issue`: all that is sent is encrypted.")
    ] = None,
    allow_plaintext: Annotated[bool, typer.Option(help="The network is private: messages may go unencrypted.")] = False,
) -> None:
    """Run one rank of the run in RUN_DIR."""
    die_with_agent()
    try:
        with reporting_errors(), sigterm_asks() as stop:
            run = RunSpec.load(run_dir / RUN_NAME)
            config = transport_config(run, host, port, advertise_host, certs, allow_plaintext)
            _run_rank(run, run_dir, config, stop)
    except FarpipeError as error:
        with contextlib.suppress(OSError):  # the log's disk may be full, which may be the very error
            print(f"rank {os.environ.get('RANK', '?')}: {error}{_how_to_go_on(error)}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _how_to_go_on(error: FarpipeError) -> str:
    """Advice behind the error of a run that broke under torchrun, where nobody else gives it."""
    if not isinstance(error, RunError) or isinstance(error, DivergedError) or "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return "; start the same commands again to continue from the newest checkpoint (farpipe train: --resume)"


def transport_config(
    run: RunSpec, host: str, port: int, advertise_host: str | None, certs: Path | None, allow_plaintext: bool
) -> TransportConfig:
    """Configuration of the transport of this process, whose RANK and LOCAL_RANK are in the environment."""
    settings, sites = run.transport, tuple(run.places.site(process) for process in range(run.num_processes))
    rank = int(os.environ.get("RANK", "0"))
    links = run.links()
    bandwidths = {pair: run.problem.links[name].bandwidth_bytes_per_s for pair, (name, _) in links.items()}
    return TransportConfig(
        streams=settings.streams,
        timeout_s=settings.timeout_s,
        outage_s=settings.outage_s,
        connect_timeout_s=settings.connect_timeout_s,
        host=host,
        port=port + int(os.environ.get("LOCAL_RANK", "0")) if port else 0,
        advertise_host=advertise_host,
        tls=TlsFiles.find(certs, sites[rank]) if certs and rank < len(sites) else None,
        sites=sites,
        allow_plaintext=allow_plaintext,
        bandwidths=bandwidths,
        headroom=1.0 if run.replan is None else REPLAN_HEADROOM,
        links=links,
        own_paths=None if run.light_paths is None else lambda kind, tag: run.own_path(kind, *tag),
    )


def _run_rank(run: RunSpec, run_dir: Path, config: TransportConfig, stop: Callable[[], bool]) -> None:
    rendezvous = rendezvous_from_env(config.connect_timeout_s)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != run.num_processes:
        raise InputError(f"{run_dir / RUN_NAME} is for {run.num_processes} processes, but {world_size} were started")
    if run.device == "cuda":
        choose_gpu()
    gc.freeze()  # collections would otherwise walk over all of torch's objects, now and then in the middle of a step
    leaving: FarpipeError | None = None
    memory = message_memory(run.device)
    with connect(rank, world_size, config, rendezvous, allocate=memory) as transport:
        open_channels(run, transport)
        try:
            train_rank(run, TensorPeers(transport), run_dir, stop=stop, make_watch=Watch, make_planner=ChunkPlanning)
        except (DivergedError, RunStoppedError, RunInterruptedError) as error:  # on all ranks: nobody has to be told
            leaving = error
    if leaving is not None:
        raise leaving


if __name__ == "__main__":
    typer.run(main)
