"""One rank's process: ``python -m farpipe.engine.launch.rank_main RUN_DIR``, under farpipe's launcher or torchrun.

On real sites every rank needs the address under which the others reach it, for example

    torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500 \\
        -m farpipe.engine.launch.rank_main RUN_DIR --host 10.0.0.1 --certs certs/zurich
"""

import contextlib
import gc
import os
import secrets
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from farpipe.core.errors import DivergedError, FarpipeError, InputError, RunError, RunInterruptedError, RunStoppedError
from farpipe.engine.checkpoint.folders import site_folder
from farpipe.engine.control.chunk_planning import ChunkPlanning
from farpipe.engine.control.watch import ReplanWatch
from farpipe.engine.executor.channels import open_channels
from farpipe.engine.executor.peers import Peers, TensorPeers
from farpipe.engine.executor.staging import message_memory
from farpipe.engine.figures.metrics import RUN_NAME
from farpipe.engine.launch.reports import (
    INTERRUPTED,
    REPORT_VARIABLE,
    report_done,
    report_error,
    report_notice,
    reporting_errors,
)
from farpipe.engine.lock import RUN_SHA256_VARIABLE, digest_of
from farpipe.engine.message_room import buffer_bytes
from farpipe.engine.outer.agent import running_agent
from farpipe.engine.outer.elastic_trainer import ElasticTrainer, MakeElastic
from farpipe.engine.outer.environment import AGENTS_VARIABLE, SITE_VARIABLE, Agents
from farpipe.engine.outer.local_membership import LocalMembership
from farpipe.engine.outer.local_trainer import LocalTrainer
from farpipe.engine.outer.membership import Membership
from farpipe.engine.outer.sites import run_at, sites_of
from farpipe.engine.processes import (
    LeaveRequest,
    die_with_agent,
    end_at_once,
    end_soon,
    ending_on_request,
    leave_request,
)
from farpipe.engine.publish.publisher import Publisher
from farpipe.engine.rendezvous import TorchStore, rendezvous_from_env, store_from_env
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages.make_stage import choose_gpu
from farpipe.engine.train import train_rank
from farpipe.engine.transport import Transport, TransportConfig, connect
from farpipe.engine.transport.meeting import telling_others
from farpipe.engine.transport.rendezvous import GIVING_UP_S
from farpipe.engine.transport.security.tls import TlsFiles

REPLAN_HEADROOM = 2.0
"""Factor on the rates that sending keeps to: a search for better orders has to see when a link gets faster.

Without any limit messages overrun the queue of a link that has become slower, and steps took a quarter longer.
"""


def main(
    run_dir: Annotated[Path, typer.Argument(help="Directory with run.json; rank 0 writes the results to it.")],
    host: Annotated[str, typer.Option(help="Address of this machine to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port for the first rank of this machine, the next ones take the next; 0: any free.")
    ] = 0,
    advertise_host: Annotated[
        str | None, typer.Option(help="Address to announce to the others, if not --host.")
    ] = None,
    certs: Annotated[
        Path | None, typer.Option(help="This site's folder from `farpipe certs issue`: all that is sent is encrypted.")
    ] = None,
    allow_plaintext: Annotated[bool, typer.Option(help="The network is private: messages may go unencrypted.")] = False,
) -> None:
    """Run one rank of the run in RUN_DIR.

    `farpipe train` and torchrun start it. Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
    FARPIPE_RUN_TOKEN, the secret by which ranks know each other. On an address that other machines can reach it needs
    --certs, or --allow-plaintext on a private network.
    """
    die_with_agent()
    with leave_request(end_at_once) as request:
        exit_code = 1
        try:
            with reporting_errors(), contextlib.ExitStack() as stack:
                with _telling_others():
                    run, make_elastic = _load(run_dir), None
                    if site := os.environ.get(SITE_VARIABLE):
                        agents = Agents.from_env(site, host, certs, allow_plaintext=allow_plaintext)
                        make_elastic = partial(_elastic, run, agents)
                        run, whole_dir, run_dir = run_at(run, site), run_dir, site_folder(run_dir, site)
                        run_dir.mkdir(parents=True, exist_ok=True)
                        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") == "0":
                            stack.enter_context(running_agent(whole_dir, agents))
                    config = transport_config(run, host, port, advertise_host, certs, allow_plaintext)
                _run_rank(run, run_dir, config, request, make_elastic)
            exit_code = 0
        except FarpipeError as error:
            _print(error)
            exit_code = error.exit_code
        except KeyboardInterrupt as error:
            if str(error):
                _print(error)
            exit_code = INTERRUPTED
        finally:
            report_done(exit_code)
            end_soon(exit_code, _say_late)
    sys.exit(exit_code)


def _elastic(whole: RunSpec, agents: Agents, run: RunSpec, peers: Peers) -> ElasticTrainer | LocalTrainer:
    """The work of this rank of a site that can leave and return."""
    if agents.sites != sites_of(whole):
        raise InputError(f"{AGENTS_VARIABLE} has the sites {agents.sites}, the run {sites_of(whole)}: in this order")
    if whole.local_steps is not None:
        return LocalTrainer(run, peers, whole, LocalMembership(whole, agents, peers))
    return ElasticTrainer(run, peers, whole, Membership(whole, agents, peers))


def _print(error: BaseException) -> None:
    """Print the error, and first the way that a fault of the user's code took."""
    with contextlib.suppress(OSError):  # the log's disk may be full, which may be the very error
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"rank {os.environ.get('RANK', '?')}: {error}{_how_to_go_on(error)}", file=sys.stderr, flush=True)


def _say_late(text: str) -> None:
    """Report that this process has not ended by itself, to its log and to the launcher."""
    report_notice(text)
    with contextlib.suppress(OSError):
        print(f"rank {os.environ.get('RANK', '?')}: {text}", file=sys.stderr, flush=True)


def _end(error: FarpipeError) -> None:
    """End the process from any thread."""
    report_error(error)
    _print(error)
    os._exit(error.exit_code)


@contextlib.contextmanager
def _telling_others() -> Iterator[None]:
    """Inside, what keeps this rank from the meeting is said there, unless a launcher of farpipe's hears of it."""
    try:
        yield
    except FarpipeError as error:
        if REPORT_VARIABLE not in os.environ:
            with contextlib.suppress(FarpipeError):
                rendezvous_from_env(GIVING_UP_S).give_up(str(error))
        raise


def _load(run_dir: Path) -> RunSpec:
    """The run that the launcher has started; InputError if its files have changed since."""
    run, digest = RunSpec.load(run_dir / RUN_NAME), os.environ.get(RUN_SHA256_VARIABLE)
    if digest not in (None, digest_of(run_dir)):
        raise InputError(f"{run_dir / RUN_NAME}: was changed while the run started; start the run again")
    return run


def _how_to_go_on(error: BaseException) -> str:
    """Advice after the error of a run that broke under torchrun, where only the rank can give it."""
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
    rates = {name: run.rate_of(link.bandwidth_bytes_per_s) for name, link in run.plan.problem.links.items()}
    bandwidths = {pair: rates[name] for pair, (name, _) in links.items()}
    latencies_s = [link.latency_s for link in run.plan.problem.links.values()]
    latencies_s += [change.latency_s for change in run.link_changes]
    return TransportConfig(
        streams=settings.streams,
        timeout_s=settings.timeout_s,
        outage_s=settings.outage_s,
        connect_timeout_s=settings.connect_timeout_s,
        buffer_bytes=buffer_bytes(run),
        host=host,
        port=port + int(os.environ.get("LOCAL_RANK", "0")) if port else 0,
        advertise_host=advertise_host,
        tls=TlsFiles.find(certs, sites[rank]) if certs and rank < len(sites) else None,
        sites=sites,
        allow_plaintext=allow_plaintext,
        bandwidths=bandwidths,
        latency_s=max(latencies_s, default=0.0),
        headroom=1.0 if run.replan is None else REPLAN_HEADROOM,
        links=links | run.links_to_subscribers(),
        own_paths=None if run.light_paths is None else lambda kind, tag: run.own_path(kind, *tag),
    )


@contextlib.contextmanager
def _leaving_at_once(request: LeaveRequest) -> Iterator[None]:
    """Inside, while it waits for the others, a request to leave ends the rank at once; farpipe's launcher has the ranks
    meet in no time, and ends a run itself."""
    if REPORT_VARIABLE in os.environ:
        yield
        return
    why = "asked to leave before all ranks had met: this attempt trained nothing; start the same commands again"
    with ending_on_request(request, lambda: _end(RunStoppedError(why))):
        yield


def _run_rank(
    run: RunSpec, run_dir: Path, config: TransportConfig, request: LeaveRequest, make_elastic: MakeElastic | None
) -> None:
    leaving: FarpipeError | None = None
    with contextlib.ExitStack() as stack:
        with _leaving_at_once(request):
            store = store_from_env(config.connect_timeout_s)
            rendezvous = rendezvous_from_env(config.connect_timeout_s, store=store)
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            if world_size != run.num_processes:
                raise InputError(
                    f"{run_dir / RUN_NAME} is for {run.num_processes} processes, but {world_size} were started"
                )
            if run.device == "cuda":
                with telling_others(rendezvous):
                    choose_gpu()
            gc.freeze()  # collections would else walk over all of torch's objects, now and then in the middle of a step
            memory = message_memory(run.device)
            transport = stack.enter_context(connect(rank, world_size, config, rendezvous, allocate=memory))
        open_channels(run, transport)
        try:
            with _site_world(run, transport, store, config), _told_by_notes():
                train_rank(
                    run,
                    TensorPeers(transport),
                    run_dir,
                    stop=lambda: bool(request),
                    make_watch=ReplanWatch,
                    make_planner=ChunkPlanning,
                    make_publisher=partial(Publisher, config=config, links=transport.links),
                    make_elastic=make_elastic,
                )
        except (DivergedError, RunStoppedError, RunInterruptedError) as error:  # on all ranks: no rank needs a message
            leaving = error
    if leaving is not None:
        raise leaving


@contextlib.contextmanager
def _told_by_notes() -> Iterator[None]:
    """Inside, an error of the user's module is raised as one for the user: its note says where it happened."""
    try:
        yield
    except FarpipeError:
        raise
    except BaseException as error:
        if not (notes := getattr(error, "__notes__", None)):
            raise
        raise (KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RunError)(notes[-1]) from error


@contextlib.contextmanager
def _site_world(run: RunSpec, transport: Transport, store: TorchStore, config: TransportConfig) -> Iterator[None]:
    """Context in which the processes at this site that share weights are torch's world; nothing where none do."""
    if not run.is_divided:
        yield
        return
    from farpipe.engine.site.end_hung import ending_hung
    from farpipe.engine.site.mesh import longest_collective_s, site_world

    _choose_interface(run, config)
    name = transport.exchange("worlds", secrets.token_bytes(8), waiting_for="the others to join their sites")[0].hex()
    members = run.places.world(transport.rank)
    place = f"{transport.site(transport.rank)} {members[0]} {name}"  # a store may be older than this attempt
    number, timeout_s = members.index(transport.rank), longest_collective_s(run.transport)
    with (
        ending_hung(transport.check, _end),
        site_world(store.torch_store, place, number, len(members), device=run.device, timeout_s=timeout_s),
    ):
        yield


def _choose_interface(run: RunSpec, config: TransportConfig) -> None:
    """InputError where torch would send weights over a network that others may reach: it encrypts nothing."""
    if config.is_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif not config.allow_plaintext:
        key = f"layout.{run.twin_key}" if run.num_twins > 1 else "training.zero"
        raise InputError(
            f"{key}: processes at a site share weights over torch's own connections, and {config.host} can be reached "
            "from other machines; say --allow-plaintext if the site's network is private, or train with "
            f"{key} = 1"
        )


if __name__ == "__main__":
    typer.run(main)
