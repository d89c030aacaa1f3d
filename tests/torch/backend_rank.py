"""One rank of a group over the backend "farpipe": ``backend_rank.py FOLDER`` runs all CHECKS, in their order.

It writes to FOLDER which of them failed on this rank, and how. Two more groups of all ranks have the same members: one
of gloo, which is what results are held against, and one whose buffers are small.
"""

import json
import os
import random
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_pipelining
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

import farpipe.torch
from farpipe.core.schedule.library import order
from farpipe.core.schedule.torch_csv import to_torch_csv
from farpipe.engine.executor.peers import DTYPES
from pipelines import two_sites

NUM_RANKS, NUM_MICROBATCHES = 3, 6
TIMEOUT = timedelta(seconds=60)
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def all_kinds_of_tensors_arrive_as_they_were_sent(me):
    grid = torch.arange(24).reshape(4, 6)
    sent = [torch.arange(6).to(torch.float32).to(dtype).view(2, 3) for dtype in DTYPES]
    sent += [grid.t(), grid[:, ::2], grid[1:3, 1:3], torch.tensor(3.5), torch.empty(0, 4), torch.zeros(3_000_000) + me]
    sent += [torch.tensor([1 + 2j, 3 - 1j]).conj().imag, torch.nn.Parameter(torch.ones(2)), torch.ones(1).expand(7)]
    works = [dist.isend(tensor, (me + 1) % NUM_RANKS) for tensor in sent]
    for tensor in sent:
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.recv(found, (me - 1) % NUM_RANKS)
        expected = tensor.detach().resolve_neg()
        if tensor.numel() == 3_000_000:
            expected = torch.zeros(3_000_000) + (me - 1) % NUM_RANKS
        assert torch.equal(found.view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8))
    for work in works:
        work.wait()


def receives_may_be_strided_and_are_written_in_place(me):
    whole = torch.zeros(4, 6)
    work = dist.irecv(whole[:, 1::2], (me - 1) % NUM_RANKS)
    dist.send(torch.full((4, 3), me + 1.0), (me + 1) % NUM_RANKS)
    assert work.wait()
    assert work.is_completed()
    assert whole.sum() == 12 * ((me - 1) % NUM_RANKS + 1)


def what_is_written_after_a_send_does_not_arrive(me):
    tensor = torch.zeros(1 << 16)
    work = dist.isend(tensor, (me + 1) % NUM_RANKS)
    work.wait()
    tensor.fill_(7)
    found = torch.ones(1 << 16)
    dist.recv(found, (me - 1) % NUM_RANKS)
    assert found.sum() == 0


def a_long_tensor_is_sent_from_its_own_memory_and_received_where_it_belongs(me):
    sizes = (1 << 21, 1 << 24, 3 << 20)
    sent = [torch.full((size // 4,), float(me)) for size in sizes]
    works = [dist.isend(tensor, (me + 1) % NUM_RANKS) for tensor in sent]
    found = [torch.zeros(size // 4) for size in sizes]
    receives = [dist.irecv(tensor, (me - 1) % NUM_RANKS) for tensor in found]
    for work, tensor in zip(works, sent, strict=True):
        work.wait()
        assert work.is_completed()
        tensor.fill_(-1)  # it is the caller's again, whether all of it has arrived or not
    for work, tensor in zip(receives, found, strict=True):
        work.wait()
        assert (tensor == (me - 1) % NUM_RANKS).all()


def a_long_sum_comes_in_where_it_belongs(me):
    """What is added takes memory of the transport's, the finished sum none; shares of unequal numbers of pieces."""
    inbox, sizes = dist.group.WORLD.transport._inbox, []
    allocate = inbox._allocate
    inbox._allocate = lambda size: sizes.append(size) or allocate(size)
    tensor, expected = (torch.arange(3 * (1 << 20) + 2, dtype=torch.float32) % 7 * (me + 1) for _ in range(2))
    dist.all_reduce(tensor)
    inbox._allocate = allocate
    dist.all_reduce(expected, group=GLOO)
    assert torch.equal(tensor, expected)
    assert sum(sizes) <= 2 * (tensor.nbytes // 3 + 4)


def a_blocking_send_waits_for_no_receive(me):
    """The second finds no room on the other side until the first is taken, and is copied for the caller."""
    if me == 0:
        for number in range(2):
            tensor = torch.full((3 << 18,), float(number))
            dist.send(tensor, 1, group=SMALL)
            tensor.fill_(-1)
    dist.barrier(GLOO)
    if me == 1:
        for number in range(2):
            found = torch.zeros(3 << 18)
            dist.recv(found, 0, group=SMALL)
            assert (found == number).all()


def many_tags_need_one_thread(me):
    others, num_threads = ((me + 1) % NUM_RANKS, (me - 1) % NUM_RANKS), threading.active_count()
    found = [torch.zeros(2) for _ in range(500)]
    works = [dist.irecv(tensor, others[1], tag=tag) for tag, tensor in enumerate(found)]
    assert threading.active_count() <= num_threads + 1
    for tag in reversed(range(500)):
        dist.send(torch.full((2,), float(tag)), others[0], tag=tag)
    for tag, work in enumerate(works):
        work.wait()
        assert (found[tag] == tag).all()


def a_forked_child_leaves_the_group_alone(me):
    child = os.fork()
    if not child:
        for group in (dist.group.WORLD, SMALL):
            group._leave()
            group.shutdown()
            group.abort()
        with suppress(dist.DistBackendError):
            dist.send(torch.zeros(1), (me + 1) % NUM_RANKS)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found = torch.zeros(1)
    work = dist.isend(torch.full((1,), float(me)), (me + 1) % NUM_RANKS)
    dist.recv(found, (me - 1) % NUM_RANKS)
    work.wait()
    assert found == (me - 1) % NUM_RANKS
    dist.barrier()


def tags_keep_messages_apart_in_whatever_order_they_are_waited_for(me):
    others = (me + 1) % NUM_RANKS, (me - 1) % NUM_RANKS
    found = {tag: torch.zeros(2) for tag in (5, 0, 2_000_000_000)}
    works = {tag: dist.irecv(tensor, others[1], tag=tag) for tag, tensor in found.items()}
    for tag in reversed(found):
        dist.send(torch.full((2,), float(tag)), others[0], tag=tag)
        works[tag].wait()  # the one that was asked for last comes first
    assert all((tensor == float(tag)).all() for tag, tensor in found.items())


def both_sides_may_send_more_than_the_buffers_hold_before_they_receive(me):
    works = [dist.isend(torch.full((1 << 17,), float(n)), 1 - me, group=SMALL) for n in range(8) if me < 2]
    for n in range(8 if me < 2 else 0):
        found = torch.empty(1 << 17)
        dist.recv(found, 1 - me, group=SMALL)
        assert (found == n).all()
    for work in works:
        work.wait()


def random_interleavings_equal_gloo(me):
    for seed in range(12):
        assert interleaved(me, seed, dist.group.WORLD) == interleaved(me, seed, GLOO)


def interleaved(me, seed, group):
    """What this rank receives when all ranks send and receive in random orders, the same for every group."""
    common, own = random.Random(seed), random.Random(100 * seed + me)
    messages = []
    for number in range(40):
        source, target = common.sample(range(NUM_RANKS), 2)
        messages.append((source, target, common.randrange(3), common.choice([0, 1, 7, 5000]), number))
    lanes = {}
    for message in messages:
        if me in message[:2]:
            lanes.setdefault(message[:3], []).append(message)
    found, works = {}, []
    while lanes:  # within a lane in its order, between lanes in any
        lane = own.choice(sorted(lanes))
        source, target, tag, size, number = lanes[lane].pop(0)
        if not lanes[lane]:
            del lanes[lane]
        if source == me:
            works.append(dist.isend(torch.full((size,), float(number)), target, group=group, tag=tag))
        else:
            found[number] = torch.zeros(size)
            works.append(dist.irecv(found[number], source, group=group, tag=tag))
    own.shuffle(works)
    for work in works:
        work.wait()
    return {number: tensor.tolist() for number, tensor in found.items()}


def collectives_equal_gloo(me):
    for size in (3, 30_000):
        for name in COLLECTIVES:
            results = [COLLECTIVES[name](me, size, group) for group in (dist.group.WORLD, GLOO)]
            assert all(map(torch.equal, *results)), (name, size)


def numbers(me, size):
    return torch.arange(size, dtype=torch.float64) * (me + 2) % 17


def all_reduced(op):
    def call(me, size, group):
        tensor = numbers(me, size) if op not in (dist.ReduceOp.BXOR,) else numbers(me, size).long()
        work = dist.all_reduce(tensor, op, group=group, async_op=True)
        work.wait()
        return [tensor]

    return call


def broadcast(me, size, group):
    tensor = numbers(me, size)
    dist.broadcast(tensor, 1, group=group)
    return [tensor]


def reduced(me, size, group):
    tensor = numbers(me, size)
    dist.reduce(tensor, 2, group=group)
    return [tensor] if me == 2 else []


def all_gathered(me, size, group):
    found = [torch.empty(size, dtype=torch.float64) for _ in range(NUM_RANKS)]
    dist.all_gather(found, numbers(me, size), group=group)
    return found


def all_gathered_flat(me, size, group):
    found = torch.empty(NUM_RANKS * size, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its name changes in torch 2.13
        dist.all_gather_into_tensor(found, numbers(me, size), group=group)
    return [found]


def reduce_scattered(me, size, group):
    found = torch.empty(size, dtype=torch.float64)
    if group is GLOO:  # gloo of torch 2.10 has none
        everything = numbers(me, NUM_RANKS * size)
        dist.all_reduce(everything, group=group)
        return [everything.view(NUM_RANKS, size)[me]]
    dist.reduce_scatter(found, list(numbers(me, NUM_RANKS * size).split(size)), group=group)
    return [found]


def gathered(me, size, group):
    found = [torch.empty(size, dtype=torch.float64) for _ in range(NUM_RANKS)] if me == 1 else None
    dist.gather(numbers(me, size), found, 1, group=group)
    return found or []


def scattered(me, size, group):
    found = torch.empty(size, dtype=torch.float64)
    dist.scatter(found, [numbers(r, size) for r in range(NUM_RANKS)] if me == 1 else None, 1, group=group)
    return [found]


def all_to_all(me, size, group):
    """Uneven: rank r sends r + 1 rows to everyone."""
    found = torch.empty(sum(range(1, NUM_RANKS + 1)), size, dtype=torch.float64)
    rows = numbers(me, NUM_RANKS * (me + 1) * size).view(-1, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_to_all_single(found, rows, list(range(1, NUM_RANKS + 1)), [me + 1] * NUM_RANKS, group=group)
    return [found]


COLLECTIVES = {name: all_reduced(getattr(dist.ReduceOp, name)) for name in ("SUM", "MAX", "PRODUCT", "BXOR")} | {
    call.__name__: call
    for call in (
        broadcast,
        reduced,
        all_gathered,
        all_gathered_flat,
        reduce_scattered,
        gathered,
        scattered,
        all_to_all,
    )
}


def objects_and_barriers_work(me):
    found = [None] * NUM_RANKS
    dist.all_gather_object(found, {"rank": me})
    assert found == [{"rank": r} for r in range(NUM_RANKS)]
    dist.barrier()
    dist.monitored_barrier(GLOO)


def objects_go_to_one_rank_and_groups_are_made_by_a_mesh(me):
    values = [{"rank": me}, None]
    if me == 0:
        dist.send_object_list(values, 1)
    if me == 1:
        dist.recv_object_list(values, 0)
        assert values == [{"rank": 0}, None]
    sides = {"dp": "gloo", "pp": "farpipe"}
    mesh = init_device_mesh("cpu", (1, NUM_RANKS), mesh_dim_names=("dp", "pp"), backend_override=sides)
    found = torch.ones(1)
    dist.all_reduce(found, group=mesh["pp"].get_group())
    assert found == NUM_RANKS
    assert dist.get_backend(mesh["pp"].get_group()) == "farpipe"


def futures_have_what_was_received(me):
    tensor = torch.zeros(2)
    future = dist.irecv(tensor, (me - 1) % NUM_RANKS).get_future()
    dist.send(torch.ones(2), (me + 1) % NUM_RANKS)
    assert future.wait()[0] is tensor
    assert tensor.sum() == 2


def receives_of_another_shape_or_dtype_are_refused(me):
    if me == 0:
        dist.send(torch.zeros(2, 3), 1)
        dist.send(torch.zeros(2), 1)
    if me == 1:
        with pytest.raises(dist.DistBackendError, match=r"rank 0 sent float32 \(2, 3\), .* is for float32 \(6,\)"):
            dist.recv(torch.zeros(6), 0)
        with pytest.raises(dist.DistBackendError, match=r"rank 0 sent float32 \(2,\), .* is for int64 \(2,\)"):
            dist.recv(torch.zeros(2, dtype=torch.int64), 0)


def what_cannot_be_sent_or_received_is_refused(me):
    with pytest.raises(ValueError, match="can't receive from any source"):
        dist.recv(torch.zeros(2))
    with pytest.raises(ValueError, match="a tag must be from 0"):
        dist.isend(torch.zeros(2), (me + 1) % NUM_RANKS, tag=-1)
    with pytest.raises(ValueError, match=r"can't be sent; send a strided one"):
        dist.isend(torch.zeros(2).to_sparse(), (me + 1) % NUM_RANKS)
    with pytest.raises(ValueError, match="no path for tensors on 'meta'"):
        dist.irecv(torch.zeros(2, device="meta"), (me + 1) % NUM_RANKS)
    with pytest.raises(ValueError, match="no path for tensors on 'meta'"):
        dist.all_reduce(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="farpipe has no reduction"):
        dist.all_reduce(torch.zeros(2), dist._make_nccl_premul_sum(2.0))
    with pytest.raises(ValueError, match=r"has 8,388,608 bytes, more than the 4,194,304 of max_message_bytes"):
        dist.isend(torch.zeros(1 << 21), (me + 1) % NUM_RANKS, group=SMALL)
    with pytest.raises(TypeError, match=r"farpipe\.torch\.Options, found dict"):
        dist.new_group(backend="farpipe", pg_options={"site": "zurich"})


def a_wait_with_a_limit_ends_and_the_message_may_still_come(me):
    tensor = torch.zeros(1)
    if me == 0:
        work = dist.irecv(tensor, 1)
        with pytest.raises(dist.DistBackendError, match=r"receive from rank 1, tag 0: not done within 0\.05 s"):
            work.wait(timedelta(seconds=0.05))
    dist.barrier()
    if me == 1:
        dist.send(torch.ones(1), 0)
    if me == 0:
        work.wait()
        assert tensor == 1


def options_that_differ_between_ranks_are_refused(me):
    options = farpipe.torch.Options(outage_s=5.0 if me == 0 else 7.0)
    with pytest.raises(ValueError, match=r"outage_s is .* on rank \d and .* on rank \d"):
        dist.new_group(backend="farpipe", pg_options=options)


def a_group_of_one_rank_does_what_can_be_done_alone(me):
    groups = [dist.new_group([rank], backend="farpipe") for rank in range(NUM_RANKS)]
    tensor = torch.full((2,), float(me))
    dist.all_reduce(tensor, group=groups[me])
    dist.barrier(groups[me])
    assert (tensor == me).all()
    dist.destroy_process_group(groups[me])


def collectives_that_differ_end_the_group_on_all_ranks(me):
    group = dist.new_group(backend="farpipe")
    size, op = (2, dist.ReduceOp.MAX) if me == 1 else (4, dist.ReduceOp.SUM)
    with pytest.raises(dist.DistBackendError, match=r"is in all_reduce .* and rank . in "):
        dist.all_reduce(torch.zeros(size), op, group=group)
    with pytest.raises(dist.DistBackendError):
        dist.isend(torch.zeros(1), (me + 1) % NUM_RANKS, group=group)
    dist.destroy_process_group(group)


def sites_with_certificates_over_an_emulated_link(me):
    site = ("zurich", "zurich", "lugano")[me]
    options = farpipe.torch.Options(
        site=site, certs=str(FOLDER / "certs"), links=str(FOLDER / "cluster.toml"), emulate=True, streams=1
    )
    group = dist.new_group(backend="farpipe", pg_options=options)
    for call in (all_reduced(dist.ReduceOp.SUM), broadcast):
        assert all(map(torch.equal, call(me, 30_000, group), call(me, 30_000, GLOO)))
    dist.destroy_process_group(group)


def sends_that_nobody_receives_are_named_when_the_group_is_destroyed(me):
    group = dist.new_group(backend="farpipe")
    if me == 0:
        for _ in range(2):
            dist.send(torch.zeros(3), 1, group=group, tag=4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dist.destroy_process_group(group)
    words = {
        0: "rank 1 never received 2 messages that this rank sent with tag 4",
        1: "this rank never received 2 messages that rank 0 sent with tag 4",
    }
    assert [str(warning.message).partition(": ")[2] for warning in found] == ([words[me]] if me in words else [])


def schedules_of_torch_have_the_gradients_of_the_whole_model(me):
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        run_schedule(me, getattr(pipelining, name), [[0], [1], [2]])
    for name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        run_schedule(me, getattr(pipelining, name), [[0, 3], [1, 4], [2, 5]])
    run_schedule(me, pipelining.ScheduleZBVZeroBubble, [[0, 5], [1, 4], [2, 3]])


def run_schedule(me, kind, stages_by_rank):
    single = len(stages_by_rank[0]) == 1

    def make(stages):
        options = {"loss_fn": torch_pipelining.squared, "scale_grads": False}
        return kind(stages[0] if single else stages, NUM_MICROBATCHES, **options)

    error = gradient_error(me, make, stages_by_rank)
    assert error <= 1e-12, (kind.__name__, error)


def gradient_error(me, make_schedule, stages_by_rank):
    """Largest difference of a gradient after two steps from twice that of the plain model."""
    num_stages = sum(map(len, stages_by_rank))
    torch.manual_seed(1000)
    shape = 2, torch_pipelining.ROWS_PER_MICROBATCH * NUM_MICROBATCHES, torch_pipelining.WIDTH
    x, target = torch.randn(shape, dtype=torch.float64)
    modules = {stage: torch_pipelining.make_module(stage) for stage in stages_by_rank[me]}
    device = torch.device("cpu")
    schedule = make_schedule([PipelineStage(module, stage, num_stages, device) for stage, module in modules.items()])
    for _ in range(2):
        schedule.step(*([x] if 0 in modules else []), **({"target": target} if num_stages - 1 in modules else {}))
    expected = torch_pipelining.plain_gradients(num_stages, x, target)
    return max(
        float((parameter.grad - 2 * reference).abs().max())
        for stage, module in modules.items()
        for parameter, reference in zip(module.parameters(), expected[stage], strict=True)
    )


def an_order_of_farpipe_has_the_gradients_of_the_whole_model(me):
    problem = two_sites(NUM_RANKS, NUM_MICROBATCHES, latency=1.0)
    file = FOLDER / f"order-{me}.csv"
    file.write_text(to_torch_csv(order("zb-2p", problem)))

    def make(stages):
        return torch_pipelining.load(stages, NUM_MICROBATCHES, file, torch_pipelining.squared)

    assert gradient_error(me, make, [[0], [1], [2]]) <= 1e-12


CHECKS = (
    all_kinds_of_tensors_arrive_as_they_were_sent,
    receives_may_be_strided_and_are_written_in_place,
    what_is_written_after_a_send_does_not_arrive,
    a_long_tensor_is_sent_from_its_own_memory_and_received_where_it_belongs,
    a_long_sum_comes_in_where_it_belongs,
    a_blocking_send_waits_for_no_receive,
    many_tags_need_one_thread,
    a_forked_child_leaves_the_group_alone,
    tags_keep_messages_apart_in_whatever_order_they_are_waited_for,
    both_sides_may_send_more_than_the_buffers_hold_before_they_receive,
    random_interleavings_equal_gloo,
    collectives_equal_gloo,
    objects_and_barriers_work,
    objects_go_to_one_rank_and_groups_are_made_by_a_mesh,
    futures_have_what_was_received,
    receives_of_another_shape_or_dtype_are_refused,
    a_wait_with_a_limit_ends_and_the_message_may_still_come,
    schedules_of_torch_have_the_gradients_of_the_whole_model,
    an_order_of_farpipe_has_the_gradients_of_the_whole_model,
    a_group_of_one_rank_does_what_can_be_done_alone,
    sites_with_certificates_over_an_emulated_link,
    sends_that_nobody_receives_are_named_when_the_group_is_destroyed,
    collectives_that_differ_end_the_group_on_all_ranks,
    options_that_differ_between_ranks_are_refused,
    what_cannot_be_sent_or_received_is_refused,
)


def main():
    global GLOO, SMALL
    dist.init_process_group("farpipe", timeout=TIMEOUT)
    me = dist.get_rank()
    GLOO = dist.new_group(backend="gloo")
    SMALL = dist.new_group(
        backend="farpipe", pg_options=farpipe.torch.Options(buffer_bytes=1 << 20, max_message_bytes=1 << 22)
    )
    errors = {}
    for check in CHECKS:
        try:
            check(me)
        except BaseException:
            errors[check.__name__] = traceback.format_exc()
            break  # what comes next would wait for what this one has left undone
        dist.barrier(GLOO)
    (FOLDER / f"errors-{me}.json").write_text(json.dumps(errors))
    if not errors:
        dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
