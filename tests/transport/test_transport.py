import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from farpipe.errors import InputError, RunError
from farpipe.transport import PeerError, Tag, TransportConfig
from farpipe.transport.clock import Clock
from farpipe.transport.wire import DTYPES
from transports import connect_all, connected, in_parallel

MIB = 1 << 20


def take(transport, peer, tag, kind="forward"):
    return transport.receive(peer, kind, tag, waiting_for=f"a test of {tag}").tensor


def random_tensor(dtype, shape):
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return (raw % 2).bool()[..., 0] if dtype is torch.bool else raw.view(dtype).reshape(shape)


def same_bits(one, other):
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


@pytest.fixture(scope="module")
def pair():
    with connected() as transports:
        yield transports


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 1, 3, 1, 2, 1, 1, 2)], ids=str)
def test_every_bit_of_a_tensor_arrives(pair, dtype, shape):
    tag, tensor = Tag(DTYPES.index(dtype), hash(shape) % 1000, 0), random_tensor(dtype, shape)
    pair[0].send(1, "forward", tag, tensor)
    assert same_bits(take(pair[1], 0, tag), tensor)


def test_a_view_that_is_not_contiguous_arrives_as_it_looks(pair):
    tensor = torch.arange(24.0).reshape(4, 6).t()[::2].requires_grad_()
    pair[1].send(0, "backward", Tag(50, 0, 0), tensor)
    received = take(pair[0], 1, Tag(50, 0, 0), "backward")
    assert torch.equal(received, tensor)
    assert not received.requires_grad


def test_64_mb_arrive_unchanged_over_all_streams(pair):
    tensor = torch.randint(0, 1 << 60, (8 * MIB,))
    pair[0].send(1, "forward", Tag(60, 0, 0), tensor)
    assert torch.equal(take(pair[1], 0, Tag(60, 0, 0)), tensor)


def test_large_and_small_messages_of_all_kinds_can_be_taken_in_any_order(pair):
    sizes = [3, 2 * MIB, 1, 70_000, MIB, 10]
    sent = {
        (kind, Tag(70, 0, i)): torch.randn(size)
        for kind in ("forward", "backward", "sync", "control")
        for i, size in enumerate(sizes)
    }
    for (kind, tag), tensor in sent.items():
        pair[0].send(1, kind, tag, tensor)
    for (kind, tag), tensor in reversed(sent.items()):
        assert torch.equal(take(pair[1], 0, tag, kind), tensor)


def test_one_kind_does_not_wait_for_another(pair):
    big, small = torch.zeros(24 * MIB), torch.ones(4)
    for i in range(2):
        pair[0].send(1, "forward", Tag(80, 0, i), big)
    pair[0].send(1, "backward", Tag(80, 0, 0), small)
    message = pair[1].receive(0, "backward", Tag(80, 0, 0), waiting_for="the small one")
    bigs = [pair[1].receive(0, "forward", Tag(80, 0, i), waiting_for="the big ones") for i in range(2)]
    assert message.times.arrival_ns < bigs[-1].times.arrival_ns
    assert torch.equal(message.tensor, small)


def test_sending_does_not_wait_for_anyone_to_ask(pair):
    tensor = torch.zeros(2 * MIB)
    start = time.monotonic()
    for i in range(10):
        pair[0].send(1, "forward", Tag(90, 0, i), tensor)
    assert time.monotonic() - start < 2.0
    time.sleep(0.5)
    for i in reversed(range(10)):
        assert take(pair[1], 0, Tag(90, 0, i)).shape == tensor.shape


def test_times_are_in_their_order(pair):
    before_ns = time.monotonic_ns()
    pair[0].send(1, "forward", Tag(100, 0, 0), torch.zeros(4 * MIB))
    times = pair[1].receive(0, "forward", Tag(100, 0, 0), waiting_for="times").times
    assert before_ns <= times.ready_ns <= times.start_ns <= times.end_ns
    assert times.start_ns < times.arrival_ns <= time.monotonic_ns()


def test_many_threads_may_send_and_receive_at_once(pair):
    def sender(thread):
        return lambda: [pair[0].send(1, "sync", Tag(110, thread, i), torch.tensor(i)) for i in range(50)]

    def receiver(thread):
        return lambda: [int(take(pair[1], 0, Tag(110, thread, i), "sync")) for i in range(50)]

    results = in_parallel(*map(sender, range(4)), *map(receiver, range(4)))
    assert results[4:] == [list(range(50))] * 4


def test_what_can_not_be_sent_is_refused_and_the_run_goes_on(pair):
    with pytest.raises(InputError, match="complex64"):
        pair[0].send(1, "forward", Tag(120, 0, 0), torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="rank 0 can't send to rank 2 of 2"):
        pair[0].send(2, "forward", Tag(120, 0, 0), torch.zeros(2))
    with pytest.raises(ValueError, match="rank 0 can't send to rank 0 of 2"):
        pair[0].send(0, "forward", Tag(120, 0, 0), torch.zeros(2))
    pair[0].send(1, "forward", Tag(120, 0, 0), torch.zeros(2))
    take(pair[1], 0, Tag(120, 0, 0))


def test_exchange_gives_everybody_everything_by_rank():
    with connected(3) as transports:
        for turn in range(3):
            parts = [bytes([rank, turn]) * (rank * 1000) for rank in range(3)]
            results = in_parallel(
                *(partial(t.exchange, "norm", parts[t.rank], waiting_for="the norm") for t in transports)
            )
            assert results == [parts] * 3


def test_posts_arrive_once_in_order_and_under_their_name():
    with connected() as (first, second):
        for i in range(5):
            second.post(0, "report", bytes([i]))
        second.post(0, "other", b"x")
        first.post(0, "own", b"mine")
        assert first.poll("own") == [(0, b"mine")]
        found = []
        deadline = time.monotonic() + 5
        while len(found) < 5 and time.monotonic() < deadline:
            found += first.poll("report")
            time.sleep(0.001)
        assert found == [(1, bytes([i])) for i in range(5)]
        assert first.poll("report") == []


def test_polling_in_a_run_that_has_ended_tells_the_reason():
    with connected() as (first, second):
        second.abort("enough")

        def poll_until_it_raises():
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                assert first.poll("report") == []
                time.sleep(0.001)

        with pytest.raises(RunError, match=r"waiting for 'report': .*enough"):
            poll_until_it_raises()


def test_a_full_send_buffer_blocks_and_then_says_so():
    with connected(buffer_bytes=MIB, timeout_s=1.0) as (first, _):
        tensor = torch.zeros(3 * MIB // 4)

        def send_more_than_the_kernel_takes():
            for i in range(100):
                first.send(1, "forward", Tag(0, 0, i), tensor)

        start = time.monotonic()
        with pytest.raises(
            RunError,
            match=r"sending the forward message of step 0, stage 0, microbatch \d+ to rank 1: no room for 3 MiB "
            r"within 1 s; .* the limit is 1 MiB \(buffer_bytes\)",
        ):
            send_more_than_the_kernel_takes()
        assert 1.0 <= time.monotonic() - start < 5.0


def test_a_full_send_buffer_goes_on_when_the_receiver_takes():
    with connected(buffer_bytes=MIB) as (first, second):
        tensors = [torch.randn(200_000) for _ in range(40)]

        def send():
            for i, tensor in enumerate(tensors):
                first.send(1, "forward", Tag(0, 0, i), tensor)

        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive(), "32 MB fit into buffers of 1 MiB on either side"
        for i, tensor in enumerate(tensors):
            assert torch.equal(take(second, 0, Tag(0, 0, i)), tensor)
        thread.join()


def test_a_full_receive_buffer_gives_way_to_the_message_that_is_waited_for():
    with connected(buffer_bytes=MIB, streams=2) as (first, second):
        tensors = [torch.full((100_000,), float(i)) for i in range(40)]
        sender = threading.Thread(
            target=lambda: [first.send(1, "forward", Tag(0, 0, i), tensor) for i, tensor in enumerate(tensors)]
        )
        sender.start()
        for i in reversed(range(40)):
            assert torch.equal(take(second, 0, Tag(0, 0, i)), tensors[i])
        sender.join()


def test_a_message_longer_than_the_buffer_passes_alone():
    with connected(buffer_bytes=1000) as (first, second):
        for i in range(3):
            first.send(1, "forward", Tag(0, 0, i), torch.full((MIB,), float(i)))
            assert take(second, 0, Tag(0, 0, i))[0] == i


def test_a_message_over_the_limit_is_refused_by_the_sender():
    with (
        connected(max_message_bytes=1000) as (first, _),
        pytest.raises(InputError, match=r"a message of 1001 B is longer than 1000 B \(max_message_bytes\)"),
    ):
        first.send(1, "forward", Tag(0, 0, 0), torch.zeros(1001, dtype=torch.uint8))


def test_a_rank_that_takes_less_than_is_sent_refuses_it():
    configs = [TransportConfig(timeout_s=5.0), TransportConfig(timeout_s=5.0, max_message_bytes=100)]
    with connected(configs=configs) as (first, second):
        first.send(1, "forward", Tag(0, 0, 0), torch.zeros(101, dtype=torch.uint8))
        with pytest.raises(PeerError, match=r"a message of 101 bytes for shape .*; the limit is 100"):
            take(second, 0, Tag(0, 0, 0))


def test_the_same_message_twice_is_an_error_not_a_mystery():
    with connected() as (first, second):
        for _ in range(2):
            first.send(1, "forward", Tag(1, 2, 3), torch.zeros(1))
        with pytest.raises(PeerError, match="the message of step 1, stage 2, microbatch 3 was sent twice"):
            take(second, 0, Tag(1, 2, 4))


def test_clocks_that_are_seconds_apart_agree_once_the_offsets_are_removed():
    skews = [0, 7_300_000_000, -3_200_000_000]
    with connected(3, clocks=[Clock(skew) for skew in skews]) as transports:
        for transport in transports:
            offsets = transport.clock_offsets()
            assert offsets[0] == 0
            assert all(abs(found - skew) < 1_000_000 for found, skew in zip(offsets, skews, strict=True))
        transports[1].send(2, "forward", Tag(0, 0, 0), torch.zeros(1))
        times = transports[2].receive(1, "forward", Tag(0, 0, 0), waiting_for="stamps").times
        journey = (times.arrival_ns - offsets[2]) - (times.start_ns - offsets[1])
        assert -1_000_000 < journey < 1_000_000_000


def test_a_rank_alone_needs_nobody():
    with connected(1) as (only,):
        assert only.exchange("x", b"mine", waiting_for="itself") == [b"mine"]
        assert only.clock_offsets() == [0]


def file_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_closing_leaves_no_thread_and_no_file_descriptor():
    connect_and_close()  # whatever is made once is made now
    threads, descriptors = threading.enumerate(), file_descriptors()
    connect_and_close()
    assert threading.enumerate() == threads
    assert file_descriptors() == descriptors


def connect_and_close():
    transports = connect_all(3)
    for source in transports:
        for target in range(3):
            if target != source.rank:
                source.send(target, "forward", Tag(0, source.rank, 0), torch.zeros(100_000))
    in_parallel(*(transport.close for transport in transports))
    transports[0].close()


def test_closing_sends_what_is_queued_first():
    first, second = connect_all(buffer_bytes=64 * MIB)
    tensors = [torch.randn(MIB) for _ in range(8)]
    for i, tensor in enumerate(tensors):
        first.send(1, "forward", Tag(0, 0, i), tensor)
    first.close()
    for i, tensor in enumerate(tensors):
        assert torch.equal(take(second, 0, Tag(0, 0, i)), tensor)
    second.close()


@pytest.mark.parametrize("streams", [1, 3, 16])
def test_any_number_of_streams_carries_the_same(streams):
    with connected(streams=streams) as (first, second):
        tensors = [torch.randn(size) for size in (1, 16_384, 16_385, 300_000, 1_234_567)]
        for i, tensor in enumerate(tensors):
            first.send(1, "forward", Tag(0, 0, i), tensor)
        for i, tensor in enumerate(tensors):
            assert torch.equal(take(second, 0, Tag(0, 0, i)), tensor)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"streams": 0}, "streams must be more than 0, found 0"),
        ({"streams": 5000}, "streams must be at most 1024"),
        ({"timeout_s": float("nan")}, "timeout_s must be more than 0, found nan"),
        ({"port": 70_000}, "port must be from 0 to 65535"),
        ({"host": "192.0.2.1"}, "192.0.2.1 can be reached from other machines, and without certificates"),
        ({"host": "0.0.0.0"}, "nobody can connect to 0.0.0.0; say which address in advertise_host"),
        ({"host": "no.such.host.invalid"}, "host 'no.such.host.invalid' is not known here"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        TransportConfig(**settings)


def test_a_public_address_needs_consent():
    assert TransportConfig(host="192.0.2.1", allow_plaintext=True).host == "192.0.2.1"


def test_a_wildcard_address_works_with_one_to_advertise():
    settings = {"host": "0.0.0.0", "advertise_host": "127.0.0.1", "allow_plaintext": True}
    with connected(**settings) as (first, second):
        first.send(1, "forward", Tag(0, 0, 0), torch.ones(3))
        assert take(second, 0, Tag(0, 0, 0)).sum() == 3
