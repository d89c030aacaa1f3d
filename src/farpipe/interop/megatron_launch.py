"""Comments on a launch of Megatron-LM: its environment, the ranks of each site, sockets between sites."""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

from farpipe.core.units import format_bytes, format_rate, format_seconds
from farpipe.planning.cost import settle

if TYPE_CHECKING:
    from farpipe.planning import Plan

_BUFFER_PER_BYTE: Final = 1.5
"""Bytes of a socket's buffer per byte in flight: about two thirds of Linux' buffers hold data."""
_MAX_BUFFER: Final = 64 * 2**20
"""Bytes of one socket's buffer beyond which more sockets share the link."""
_MAX_SOCKETS: Final = 64
"""Sockets that NCCL opens to a neighbour at most: threads times sockets of a thread (NVIDIA's NCCL user guide)."""
_MAX_THREADS: Final = 4


def launch_notes(plan: "Plan") -> list[str]:
    """Comment lines on the environment of a plan's processes; none where Megatron-LM needs nothing."""
    at = plan.layout
    notes = []
    if settle(plan.job.training, at).zero in (2, 3):
        notes.append("# Environment: CUDA_DEVICE_MAX_CONNECTIONS not 1, which Megatron-FSDP refuses.")
    elif at.tensor > 1 or at.context > 1:
        notes.append("# Environment: CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron-LM asks for before Blackwell.")
    return [*notes, *rank_notes(plan, replicas_apart=bool(at.replica_sites)), *_sockets(plan)]


def rank_notes(plan: "Plan", *, replicas_apart: bool) -> list[str]:
    """The line that says which site has which ranks of torch; none where all are at one.

    Ranks count up along tensor, context and data, then along the pipeline; `replicas_apart`: along data last.
    """
    at = plan.layout
    places = [(replica, rank) for rank in range(at.pipeline) for replica in range(at.data)]
    sites = [plan.replicas[replica][rank] for replica, rank in (sorted(places) if replicas_apart else places)]
    if len(set(sites)) == 1:
        return []
    width = at.tensor * at.context
    blocks = [[*group] for _, group in groupby(range(len(sites)), key=lambda place: sites[place])]
    ends = [(sites[block[0]], width * block[0], width * (block[-1] + 1) - 1) for block in blocks]
    ranks = [f"{site} {first}" + f"-{last}" * (last > first) for site, first, last in ends]
    model = plan.job.model
    tied = " and gradients of the embedding, which the last stage has too," if model.repeats_embedding else ""
    crosses = "sums of gradients" if at.replica_sites else f"neighbours in the pipeline{tied}"
    return [f"# Ranks by site: {', '.join(ranks)}; number the machines so (node rank). Only {crosses} cross."]


def _sockets(plan: "Plan") -> Iterator[str]:
    """Lines on the sockets of each pair of sites that messages cross: what is in flight on a link, over its streams."""
    at = plan.layout
    over = at.replica_sites or plan.sites
    ring = (*over, over[0]) if at.replica_sites or at.virtual > 1 else over
    width = at.devices_per_rank * (at.pipeline if at.replica_sites else 1)
    for one, other in sorted({(min(pair), max(pair)) for pair in pairwise(ring) if pair[0] != pair[1]}):
        link = plan.job.cluster.link(one, other) or plan.job.cluster.link(other, one)
        assert link is not None, "neighbours have a link"
        in_flight = link.bandwidth_bytes_per_s * 2 * link.latency_s
        needed = _BUFFER_PER_BYTE * in_flight / width
        sockets = 1
        while needed / sockets > _MAX_BUFFER and sockets < _MAX_SOCKETS:
            sockets *= 2
        threads, size = min(sockets, _MAX_THREADS), max(131072, round(needed / sockets))
        yield (
            f"# {one} to {other}: {format_rate(link.bandwidth_bytes_per_s)} x {format_seconds(2 * link.latency_s)} "
            f"round trip = {format_bytes(in_flight)} in flight, of {width} neighbours: NCCL_SOCKET_NTHREADS={threads} "
            f"NCCL_NSOCKS_PERTHREAD={sockets // threads}, and on the hosts net.ipv4.tcp_rmem and tcp_wmem = "
            f'"4096 131072 {size}"; NCCL_NET=Socket where NCCL finds InfiniBand, which does not reach the other site.'
        )
