import inspect
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from farpipe.core.errors import RunError
from farpipe.core.schedule.library import order
from farpipe.engine.checkpoint import checkpointer
from farpipe.engine.checkpoint.snapshot import Pieces
from farpipe.engine.executor import messengers, staging
from farpipe.engine.executor.executor import Executor, stage_ranks
from farpipe.engine.executor.peers import TensorMessage, describe, tensor_of
from farpipe.engine.executor.staging import Staging, host_tensor, message_memory
from farpipe.engine.executor.wire_types import Form, NarrowMessenger
from farpipe.engine.figures.metrics import read_metrics
from farpipe.engine.replicas import replicas
from farpipe.engine.replicas.collectives import Line, Rings
from farpipe.engine.replicas.ring_stream import RingStream
from farpipe.engine.train import train_rank
from farpipe.engine.transport import MessageTimes, Tag
from farpipe.engine.transport.clock import Clock
from in_process import run_ranks
from late_gpu import INDEX, LIMIT_S, LateGpu, LateStream, nonsense, pinned
from small_models import (
    LLAMA,
    make_batch,
    make_stages,
    placed_problem,
    reference_step,
    relative_error,
    split_backward,
    whole_model,
)
from trainings import make_run

TIMES = MessageTimes(1, 2, 3, 4)


class Outlet:
    """The transport's end: what was sent, and one tensor to receive."""

    rank, clock = 1, Clock()

    def __init__(self, arriving=None, error=None):
        self.sent, self.arriving, self.error, self.reasons = [], arriving, error, []

    def send(self, peer, kind, tag, tensor):
        if self.error is not None:
            raise self.error
        self.sent.append((peer, kind, tag, tensor.clone()))

    def receive(self, peer, kind, tag, *, waiting_for):
        return TensorMessage(self.arriving, TIMES, 12)

    def abort(self, reason):
        self.reasons.append(reason)


@pytest.fixture
def gpu():
    with LateGpu() as late:
        yield late


@pytest.fixture
def outlet():
    return Outlet()


@pytest.fixture
def staged(gpu, outlet):
    return Staging(outlet, outlet.abort, cuda=gpu)


def tag(microbatch):
    return Tag(0, 0, microbatch)


def computed(gpu, value, *, size=4):
    """A tensor that the GPU has yet to compute."""
    y = nonsense(torch.empty(size))
    gpu.compute(lambda: y.fill_(value))
    return y


def ended(staged):
    """After the step."""
    return staged.in_ns(np.zeros((0, 2), np.int64))


def test_sending_waits_for_nothing_and_messages_leave_in_order_when_they_are_computed(gpu, outlet, staged):
    gpu.may_go.clear()
    for microbatch in range(6):
        way, peer = [("forward", 2), ("backward", 0)][microbatch % 2]
        staged.send(peer, way, tag(microbatch), computed(gpu, float(microbatch)))
    assert not gpu.computing.num_done, "the GPU has not even begun"
    assert not outlet.sent
    gpu.may_go.set()
    ended(staged)
    assert [(peer, way, name) for peer, way, name, _ in outlet.sent] == [
        (2, "forward", tag(0)), (0, "backward", tag(1)), (2, "forward", tag(2)),
        (0, "backward", tag(3)), (2, "forward", tag(4)), (0, "backward", tag(5)),
    ]  # fmt: skip
    for microbatch, (*_, tensor) in enumerate(outlet.sent):
        assert tensor.tolist() == [microbatch] * 4


def test_what_is_sent_need_not_be_in_one_piece(gpu, outlet, staged):
    y = computed(gpu, 2.0, size=(4, 3))
    staged.send(2, "forward", tag(0), y[:, 1])
    ended(staged)
    assert torch.equal(outlet.sent[0][3], torch.full((4,), 2.0))


def test_memory_on_the_gpu_is_kept_until_it_is_copied(gpu, outlet, staged):
    y = computed(gpu, 5.0)
    staged.send(2, "forward", tag(0), y)
    assert [stream for _, stream in gpu.used] == [staged._to_host]
    gpu.used.clear()
    del y  # the stage has no more use for it
    ended(staged)
    assert outlet.sent[0][3].tolist() == [5.0] * 4


def test_page_locked_memory_that_waits_is_bounded(gpu, outlet, staged, monkeypatch):
    monkeypatch.setattr(staging, "WAITING_BYTES", 40)
    gpu.may_go.clear()
    staged.send(2, "forward", tag(0), computed(gpu, 0.0))  # 16 bytes each
    staged.send(2, "forward", tag(1), computed(gpu, 1.0))

    def send_one_more():
        gpu.set_device(torch.device("cuda", INDEX))
        with gpu:
            staged.send(2, "forward", tag(2), computed(gpu, 2.0))

    thread = threading.Thread(target=send_one_more, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gpu.may_go.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    ended(staged)
    gpu.may_go.clear()
    for microbatch in (3, 4):  # there is room again
        staged.send(2, "forward", tag(microbatch), computed(gpu, float(microbatch)))
    gpu.may_go.set()
    ended(staged)
    assert [tensor[0] for *_, tensor in outlet.sent] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_bound_is_what_the_plan_has_in_flight_where_that_is_more(gpu, outlet, monkeypatch):
    monkeypatch.setattr(staging, "WAITING_BYTES", 16)
    staged = Staging(outlet, outlet.abort, cuda=gpu, leaving_bytes=64)
    gpu.may_go.clear()
    for microbatch in range(4):
        staged.send(2, "forward", tag(microbatch), computed(gpu, float(microbatch)))
    assert not outlet.sent, "four messages are on their way, and none was waited for"
    gpu.may_go.set()
    ended(staged)
    assert len(outlet.sent) == 4


def test_page_locked_memory_is_taken_before_the_first_step(gpu, monkeypatch):
    made = []
    monkeypatch.setattr(staging, "host_tensor", lambda shape, *args, **kw: made.append(*shape) or torch.empty(shape))
    staging.take_page_locked({16: 2, 64: 1})
    assert made == [16, 16, 64]


def test_messages_are_rounded_on_the_gpu_and_copied_narrow(gpu, outlet, staged):
    narrowed = NarrowMessenger(staged, ("zurich", "zurich", "lugano"), "bf16")
    gpu.computing.eager = True
    x = torch.randn(6)
    narrowed.send(2, "forward", tag(0), x)
    ended(staged)
    (*_, sent), form = outlet.sent[0], Form(torch.float32, "bf16", (6,))
    assert sent.nbytes == 12 + form.head_bytes, "what is copied to the host is narrow"
    outlet.arriving = pinned(sent)
    message = narrowed.receive(2, "forward", tag(0), waiting_for="x")
    assert torch.equal(message.tensor, x.bfloat16().float())
    assert message.num_bytes == 12
    assert narrowed.rounding.num_messages == 1


def test_a_message_longer_than_the_bound_is_sent_alone(gpu, outlet, staged, monkeypatch):
    monkeypatch.setattr(staging, "WAITING_BYTES", 8)
    for microbatch in range(3):
        staged.send(2, "forward", tag(microbatch), computed(gpu, float(microbatch)))
        assert len(staged._leaving) == 1
    ended(staged)
    assert len(outlet.sent) == 3


def test_a_copy_that_fails_ends_the_run_and_says_which(gpu, outlet, staged):
    gpu.error = RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging consider ...")
    staged.send(2, "forward", tag(7), computed(gpu, 0.0))
    what = (
        "copying the forward message of step 0, stage 0, microbatch 7 for rank 2 from the GPU: "
        "CUDA error: an illegal memory access was encountered"
    )
    with pytest.raises(RunError) as caught:
        ended(staged)
    assert str(caught.value) == what
    assert outlet.reasons == [what], "whoever waits for a message now hears of it"


def test_a_message_that_cannot_be_sent_is_told_by_the_next_one(gpu):
    outlet = Outlet(error=RunError("no room within 60 s"))
    staged = Staging(outlet, outlet.abort, cuda=gpu)
    staged.send(2, "forward", tag(0), computed(gpu, 0.0))
    assert staged._leaving[0].task.exception(LIMIT_S) is not None
    with pytest.raises(RunError, match="no room within 60 s"):
        staged.send(2, "forward", tag(1), computed(gpu, 1.0))
    assert outlet.reasons == ["no room within 60 s"]


def test_when_there_is_no_page_locked_memory_the_run_ends(monkeypatch):
    def empty(*args, pin_memory=False, device=None, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand more")
        return meta(*args, device=device, **kwargs)

    meta = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(RunError, match=r"no page-locked host memory for a message of 16 B: CUDA error: out of memory;"):
        host_tensor((2, 2), torch.float32, pinned=True)
    assert host_tensor((2, 2), torch.float32, pinned=False).shape == (2, 2)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_what_arrives_is_there_for_whatever_computes_next(gpu, is_pinned):
    arrived = torch.arange(4.0)
    staged = Staging(Outlet(pinned(arrived) if is_pinned else arrived), None, cuda=gpu)
    message = staged.receive(0, "forward", tag(0), waiting_for="x")
    assert message.tensor.isnan().all(), "the host has not waited for the copy"
    y = nonsense(torch.empty(4))
    gpu.compute(lambda: y.copy_(2 * message.tensor))
    gpu.computing.synchronize()
    assert y.tolist() == [0, 2, 4, 6]
    assert (message.times, message.num_bytes) == (TIMES, 12)
    assert [stream for _, stream in gpu.used] == [gpu.computing], "the allocator knows who reads it"


def test_what_arrives_is_copied_beside_what_is_still_computed(gpu):
    staged = Staging(Outlet(pinned(torch.arange(4.0))), None, cuda=gpu)
    computed(gpu, 1.0)
    message = staged.receive(0, "forward", tag(0), waiting_for="x")
    staged._to_device.synchronize()
    assert message.tensor.tolist() == [0, 1, 2, 3]
    assert not gpu.computing.num_done


class Hours:
    """A clock that stands still but for work."""

    now = 50_000_000

    def now_ns(self):
        return self.now

    def pass_ms(self, ms):
        self.now += round(ms * 1e6)


def test_actions_are_timed_where_they_are_computed_and_told_in_the_host_s_time():
    hours = Hours()
    with LateGpu(now_ns=hours.now_ns) as gpu:
        outlet = SimpleNamespace(rank=0, clock=hours)
        staged = Staging(outlet, None, cuda=gpu)
        for _ in range(2):  # steps; the second one uses the events again
            begin, stamps = hours.now, []
            for ms in (3, 4, 5):
                start = staged.take()
                gpu.compute(lambda ms=ms: hours.pass_ms(ms))
                stamps.append((start, staged.take()))
                gpu.compute(lambda: hours.pass_ms(1))  # nobody's
            assert hours.now == begin, "nothing has been waited for"
            found = (staged.in_ns(np.array(stamps)) - begin) * 1e-6
            assert hours.now == begin + 14_000_000, "what comes after the last action has not been waited for"
            gpu.computing.synchronize()
            assert found == pytest.approx(np.array([[0, 3], [4, 8], [9, 14]]), abs=1e-3)
        assert len(staged._events) == 6


def run_staged(schedule, stages, batch, make_staging, *, num_steps=1):
    """Every rank a thread; the loss of the last step and the events of all."""
    ranks = stage_ranks(schedule)

    def work(peers):
        mine = {stage: stages[stage] for stage, rank in enumerate(ranks) if rank == peers.rank}
        with make_staging(peers) as (messenger, stamps):
            executor = Executor(schedule, mine, messenger, stamps=stamps)
            found = []
            for step in range(num_steps):
                for stage in mine.values():
                    stage.begin_step(batch)
                found.append(executor.run(step))
            return found

    events = run_ranks(len(schedule.ranks), work)
    return stages[-1].loss, events


class OnLateGpu:
    """Staging with a late GPU of this thread's own."""

    def __init__(self, peers):
        self.peers, self.gpu = peers, LateGpu(eager=True)

    def __enter__(self):
        self.gpu.__enter__()
        staged = Staging(self.peers, self.peers.abort, cuda=self.gpu)
        return staged, staged

    def __exit__(self, *error):
        self.gpu.__exit__(*error)


class OnGpu:
    """The same with the one that is there, which the ranks share."""

    def __init__(self, peers):
        self.peers = peers

    def __enter__(self):
        staged = Staging(self.peers, self.peers.abort)
        return staged, staged

    def __exit__(self, *error):
        pass


SCHEDULES = [
    order("1f1b", placed_problem((0, 1, 2), 5)),
    split_backward(order("gpipe", placed_problem((0, 1), 4))),
    split_backward(order("interleaved", placed_problem((0, 1, 0, 1), 4))),
]


def assert_equals_whole(schedule, make_staging, device, limit):
    num_stages, num_steps = len(stage_ranks(schedule)), 2
    stages, batch = make_stages(LLAMA, num_stages, torch.float64), make_batch(LLAMA, schedule.num_microbatches)
    for stage in stages:
        stage.module.to(device)
        stage.device = torch.device(device)
    loss, events = run_staged(schedule, stages, batch, make_staging, num_steps=num_steps)
    whole = whole_model(LLAMA, torch.float64)
    assert loss == pytest.approx(reference_step(whole, batch), rel=limit)
    gradients = {name: p.grad for stage in stages for name, p in stage.module.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert relative_error(gradients[name].cpu(), num_steps * parameter.grad) < limit, name
    for rank, steps in enumerate(events):
        assert len(steps[0].actions) == len(schedule.ranks[rank])
        for step in steps:
            assert (np.diff(step.actions.reshape(-1)) >= 0).all(), "one after the other"
        assert steps[0].actions.max() < steps[1].actions.min()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.method)
def test_the_gradients_through_staging_are_those_of_the_whole_model(schedule):
    assert_equals_whole(schedule, OnLateGpu, "cpu", 1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.method)
def test_the_gradients_of_a_real_gpu_are_those_of_the_whole_model(schedule):
    assert_equals_whole(schedule, OnGpu, "cuda", 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"num_replicas": 2, "zero1": True}, {"wire_type": "int8"}], ids=["alone", "replicas", "narrowed"]
)
def test_training_through_staging_is_training(options, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    run = make_run(text, **options)
    num_ranks = run.num_processes
    (tmp_path / "plain").mkdir()
    run_ranks(num_ranks, lambda peers: train_rank(run, peers, tmp_path / "plain"))
    staged_ranks = []

    def make_staging(peers, abort, **options):
        staged_ranks.append(peers.rank)
        return Staging(peers, abort, cuda=gpu_of_thread.gpu, **options)

    class RingOfThread(RingStream):
        """A ring on the GPU of the thread that makes it."""

        def __init__(self, peers):
            super().__init__(peers, gpu_of_thread.gpu)
            self.gpu = gpu_of_thread.gpu
            self._stream = LateStream(self.gpu, eager=True)

        def after_actions(self, work):
            run = super().after_actions(work)

            def in_its_thread(line):
                with self.gpu:
                    run(line)

            return in_its_thread

    def work(peers):
        gpu_of_thread.gpu = LateGpu(eager=True)
        with gpu_of_thread.gpu:
            return train_rank(run.model_copy(update={"device": "cuda"}), peers, tmp_path / "staged")

    gpu_of_thread = threading.local()
    monkeypatch.setattr(messengers, "Staging", make_staging)
    monkeypatch.setattr(replicas, "RingStream", RingOfThread)
    monkeypatch.setattr(checkpointer, "Pieces", lambda pinned: Pieces(pinned=pinned, cuda=gpu_of_thread.gpu))
    (tmp_path / "staged").mkdir()
    run_ranks(num_ranks, work)
    assert len(staged_ranks) == num_ranks
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("plain", "staged")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == run.num_steps


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("cuda", True)])
def test_a_rank_with_a_gpu_receives_into_page_locked_memory(gpu, monkeypatch, device, expected):
    made = []
    monkeypatch.setattr(staging, "host_tensor", lambda *args, **kw: made.append(host_tensor(*args, **kw)) or made[0])
    data = message_memory(device)(16)
    data[:] = torch.arange(4.0).numpy().tobytes()
    assert tensor_of(data, describe(torch.empty(4))).tolist() == [0, 1, 2, 3]
    assert hasattr(made[0], "is_in_pinned_memory") == expected
    assert made[0].tolist() == list(bytes(data))


def test_what_is_used_of_cuda_is_there():
    stream, event = torch.cuda.Stream, torch.cuda.Event
    for method, arguments in [
        (torch.cuda.current_stream, ()),
        (torch.cuda.stream, ("stream",)),
        (torch.cuda.current_device, ()),
        (torch.cuda.set_device, ("device",)),
        (stream.wait_stream, ("self", "stream")),
        (stream.wait_event, ("self", "event")),
        (stream.record_event, ("self", "event")),
        (stream.synchronize, ("self",)),
        (event.record, ("self",)),
        (event.synchronize, ("self",)),
        (event.elapsed_time, ("self", "end")),
    ]:
        inspect.signature(method).bind(*arguments)
    inspect.signature(event.__new__).bind(event, enable_timing=True)
    inspect.signature(event.__new__).bind(event, blocking=True)


def test_a_stage_has_the_tokens_of_the_step_where_it_computes():
    stage, batch = make_stages(LLAMA, 1, torch.float32)[0], make_batch(LLAMA, 3)
    stage.begin_step(batch)
    assert stage._batch is batch
    stage.device = torch.device("meta")
    stage.begin_step(batch)
    assert {stage._batch.tokens.device.type, stage._batch.targets.device.type} == {"meta"}
    assert stage._batch.num_target_tokens == batch.num_target_tokens


def test_replicas_sum_beside_the_actions_on_a_stream_of_their_own():
    """Two members; what the actions still have to do does not keep the ring from its turn, nor the other way round."""

    def work(peers):
        with LateGpu() as gpu:
            ring = RingStream(peers, gpu)
            ring._stream = LateStream(gpu, eager=True)  # what torch adds on a CPU is done at once
            grads = nonsense(torch.empty(128))
            gpu.compute(lambda: grads.fill_(peers.rank + 1.0))
            run = ring.after_actions(lambda line: Rings([(0, 1)], peers.rank).all_reduce(grads, line))
            gpu.compute(lambda: pytest.fail("the ring has waited for an action that came after"))
            line = Line(ring.messenger, 0, 0, "the sum")
            with torch.no_grad():
                run(line)
            ring._stream.synchronize()
            assert gpu.computing.num_done == 2, "the gradient, and the place where it was complete"
            return grads

    for grads in run_ranks(2, work):
        assert grads.tolist() == [3.0] * 128
