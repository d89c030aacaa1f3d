import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.engine.transport import PeerError, Tag, TransportConfig
from farpipe.engine.transport.clock import Clock
from farpipe.engine.transport.health import Health
from farpipe.engine.transport.inbox import Inbox, allocate_bytes
from farpipe.engine.transport.outbox import Outbox
from farpipe.engine.transport.wire import Channel, FragmentHeader
from transports import connect_all, connected, in_parallel
from waiting import wait_until

MIB = 1 << 20


def take(transport, peer, tag, kind="forward"):
    return transport.receive(peer, kind, tag, waiting_for=f"a test of {tag}").data


@pytest.fixture(scope="module")
def pair():
    with connected() as transports:
        yield transports


@pytest.mark.parametrize("num_bytes", [0, 1, 4097, 70_000])
@pytest.mark.parametrize("description", [b"", b"float32, 2 x 3", bytes(256)], ids=["none", "short", "longest"])
def test_every_bit_and_the_description_arrive(pair, num_bytes, description):
    tag, data = Tag(num_bytes, len(description), 0), os.urandom(num_bytes)
    pair[0].send(1, "forward", tag, data, description)
    message = pair[1].receive(0, "forward", tag, waiting_for="it")
    assert message.data == data
    assert message.description == description


def test_a_buffer_of_any_shape_arrives_as_its_bytes(pair):
    numbers = np.arange(12, dtype=np.int32).reshape(3, 4)
    pair[1].send(0, "backward", Tag(50, 0, 0), numbers.data)
    assert take(pair[0], 1, Tag(50, 0, 0), "backward") == numbers.tobytes()


def test_received_memory_comes_from_the_allocator_that_was_given():
    given = []

    def allocate(num_bytes):
        given.append(memoryview(bytearray(num_bytes)))
        return given[-1]

    with connected(allocate=allocate) as (first, second):
        first.send(1, "forward", Tag(0, 0, 0), b"12345")
        assert take(second, 0, Tag(0, 0, 0)) is given[0]


def test_64_mb_arrive_unchanged_over_all_streams(pair):
    data = os.urandom(64 * MIB)
    pair[0].send(1, "forward", Tag(60, 0, 0), data)
    assert take(pair[1], 0, Tag(60, 0, 0)) == data


def test_large_and_small_messages_of_all_kinds_can_be_taken_in_any_order(pair):
    sizes = [3, 2 * MIB, 1, 70_000, MIB, 10]
    sent = {
        (kind, Tag(70, 0, i)): os.urandom(4 * size)
        for kind in ("forward", "backward", "sync", "control")
        for i, size in enumerate(sizes)
    }
    for (kind, tag), data in sent.items():
        pair[0].send(1, kind, tag, data)
    for (kind, tag), data in reversed(sent.items()):
        assert take(pair[1], 0, tag, kind) == data


def test_one_kind_does_not_wait_for_another(pair):
    big, small = bytes(96 * MIB), b"small"
    for i in range(2):
        pair[0].send(1, "forward", Tag(80, 0, i), big)
    pair[0].send(1, "backward", Tag(80, 0, 0), small)
    message = pair[1].receive(0, "backward", Tag(80, 0, 0), waiting_for="the small one")
    bigs = [pair[1].receive(0, "forward", Tag(80, 0, i), waiting_for="the big ones") for i in range(2)]
    assert message.times.arrival_ns < bigs[-1].times.arrival_ns
    assert message.data == small


def test_sending_does_not_wait_for_anyone_to_ask(pair):
    data = bytes(8 * MIB)
    for i in range(10):
        pair[0].send(1, "forward", Tag(90, 0, i), data)
    time.sleep(0.5)
    for i in reversed(range(10)):
        assert len(take(pair[1], 0, Tag(90, 0, i))) == len(data)


def test_times_are_in_their_order(pair):
    before_ns = time.monotonic_ns()
    pair[0].send(1, "forward", Tag(100, 0, 0), bytes(16 * MIB))
    times = pair[1].receive(0, "forward", Tag(100, 0, 0), waiting_for="times").times
    assert before_ns <= times.ready_ns <= times.start_ns <= times.end_ns
    assert times.start_ns < times.arrival_ns <= time.monotonic_ns()


def test_many_threads_may_send_and_receive_at_once(pair):
    def sender(thread):
        return lambda: [pair[0].send(1, "sync", Tag(110, thread, i), bytes([i])) for i in range(50)]

    def receiver(thread):
        return lambda: [take(pair[1], 0, Tag(110, thread, i), "sync")[0] for i in range(50)]

    results = in_parallel(*map(sender, range(4)), *map(receiver, range(4)))
    assert results[4:] == [list(range(50))] * 4


def test_what_can_not_be_sent_is_refused_and_the_run_goes_on(pair):
    with pytest.raises(ValueError, match="a description of 257 bytes; the limit is 256"):
        pair[0].send(1, "forward", Tag(120, 0, 0), b"12", bytes(257))
    with pytest.raises(ValueError, match="rank 0 can't send to rank 2 of 2"):
        pair[0].send(2, "forward", Tag(120, 0, 0), b"12")
    with pytest.raises(ValueError, match="rank 0 can't send to rank 0 of 2"):
        pair[0].send(0, "forward", Tag(120, 0, 0), b"12")
    pair[0].send(1, "forward", Tag(120, 0, 0), b"12")
    take(pair[1], 0, Tag(120, 0, 0))


def test_posts_arrive_once_in_order_and_under_their_name():
    with connected() as (first, second):
        for i in range(5):
            second.post(0, "report", bytes([i]))
        second.post(0, "other", b"x")
        first.post(0, "own", b"mine")
        assert first.poll("own") == [(0, b"mine")]
        found = []
        wait_until(lambda: found.extend(first.poll("report")) or len(found) >= 5, "all posts had come")
        assert found == [(1, bytes([i])) for i in range(5)]
        assert first.poll("report") == []


def test_polling_in_a_run_that_has_ended_tells_the_reason():
    with connected() as (first, second):
        second.abort("enough")

        def poll_until_it_raises():
            wait_until(lambda: first.poll("report"), "the run had ended")

        with pytest.raises(RunError, match=r"waiting for 'report': .*enough"):
            poll_until_it_raises()


@pytest.mark.slow
def test_a_full_send_buffer_blocks_and_then_says_so():
    with connected(buffer_bytes=MIB, timeout_s=1.0) as (first, _):
        data = bytes(3 * MIB)

        def send_more_than_the_kernel_takes():
            for i in range(100):
                first.send(1, "forward", Tag(0, 0, i), data)

        start = time.monotonic()
        with pytest.raises(
            RunError,
            match=r"sending the forward message of step 0, stage 0, microbatch \d+ to rank 1: no space for 3 MiB "
            r"within 1 s; .* the limit is 1 MiB \(buffer_bytes\)",
        ):
            send_more_than_the_kernel_takes()
        assert time.monotonic() - start >= 1.0


@pytest.mark.slow
def test_a_full_send_buffer_goes_on_when_the_receiver_takes():
    with connected(buffer_bytes=MIB) as (first, second):
        messages = [os.urandom(800_000) for _ in range(40)]

        def send():
            for i, data in enumerate(messages):
                first.send(1, "forward", Tag(0, 0, i), data)

        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive(), "32 MB fit into buffers of 1 MiB on either side"
        for i, data in enumerate(messages):
            assert take(second, 0, Tag(0, 0, i)) == data
        thread.join()


def test_a_full_receive_buffer_gives_way_to_the_message_that_is_waited_for():
    with connected(buffer_bytes=MIB, streams=2) as (first, second):
        messages = [bytes([i]) * 400_000 for i in range(40)]
        sender = threading.Thread(
            target=lambda: [first.send(1, "forward", Tag(0, 0, i), data) for i, data in enumerate(messages)]
        )
        sender.start()
        for i in reversed(range(40)):
            assert take(second, 0, Tag(0, 0, i)) == messages[i]
        sender.join()


def test_a_message_longer_than_the_buffer_passes_alone():
    with connected(buffer_bytes=1000) as (first, second):
        for i in range(3):
            first.send(1, "forward", Tag(0, 0, i), bytes([i]) * 4 * MIB)
            assert take(second, 0, Tag(0, 0, i))[0] == i


def test_a_message_over_the_limit_is_refused_by_the_sender():
    with (
        connected(max_message_bytes=1000) as (first, _),
        pytest.raises(InputError, match=r"a message of 1,001 bytes is longer than the 1,000 of max_message_bytes"),
    ):
        first.send(1, "forward", Tag(0, 0, 0), bytes(1001))


def test_a_rank_that_takes_less_than_is_sent_refuses_it():
    configs = [TransportConfig(timeout_s=60.0), TransportConfig(timeout_s=60.0, max_message_bytes=100)]
    with connected(configs=configs) as (first, second):
        first.send(1, "forward", Tag(0, 0, 0), bytes(101))
        with pytest.raises(PeerError, match=r"a message of 101 bytes; the limit is 100"):
            take(second, 0, Tag(0, 0, 0))


def test_the_same_message_twice_is_an_error_not_a_mystery():
    with connected() as (first, second):
        for _ in range(2):
            first.send(1, "forward", Tag(1, 2, 3), b"1")
        with pytest.raises(PeerError, match="the message of step 1, stage 2, microbatch 3 was sent twice"):
            take(second, 0, Tag(1, 2, 4))


def test_clocks_that_are_seconds_apart_agree_once_the_offsets_are_removed():
    skews = [0, 7_300_000_000, -3_200_000_000]
    with connected(3, clocks=[Clock(skew) for skew in skews]) as transports:
        for transport in transports:
            offsets = transport.clock_offsets()
            assert offsets[0] == 0
            assert all(abs(found - skew) < 100_000_000 for found, skew in zip(offsets, skews, strict=True))
        transports[1].send(2, "forward", Tag(0, 0, 0), b"1")
        times = transports[2].receive(1, "forward", Tag(0, 0, 0), waiting_for="stamps").times
        journey = (times.arrival_ns - offsets[2]) - (times.start_ns - offsets[1])
        assert -100_000_000 < journey < 3_000_000_000


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
                source.send(target, "forward", Tag(0, source.rank, 0), bytes(400_000))
    in_parallel(*(transport.close for transport in transports))
    transports[0].close()


@pytest.mark.slow
def test_closing_sends_what_is_queued_first():
    first, second = connect_all(buffer_bytes=64 * MIB)
    messages = [os.urandom(4 * MIB) for _ in range(8)]
    for i, data in enumerate(messages):
        first.send(1, "forward", Tag(0, 0, i), data)
    first.close()
    for i, data in enumerate(messages):
        assert take(second, 0, Tag(0, 0, i)) == data
    second.close()


@pytest.mark.parametrize("streams", [1, 3, 16])
def test_any_number_of_streams_carries_the_same(streams):
    with connected(streams=streams) as (first, second):
        messages = [os.urandom(4 * size) for size in (1, 16_384, 16_385, 300_000, 1_234_567)]
        for i, data in enumerate(messages):
            first.send(1, "forward", Tag(0, 0, i), data)
        for i, data in enumerate(messages):
            assert take(second, 0, Tag(0, 0, i)) == data


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"streams": 0}, "streams must be more than 0, found 0"),
        ({"streams": 5000}, "streams must be at most 1024"),
        ({"timeout_s": float("nan")}, "timeout_s must be more than 0, found nan"),
        ({"port": 70_000}, "port must be from 0 to 65535"),
        ({"host": "192.0.2.1"}, "192.0.2.1 can be reached from other machines, and without certificates"),
        ({"host": "0.0.0.0"}, "other machines can't connect to 0.0.0.0; set advertise_host"),
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
        first.send(1, "forward", Tag(0, 0, 0), b"abc")
        assert take(second, 0, Tag(0, 0, 0)) == b"abc"


def test_the_delay_of_a_slow_link_is_no_silence():
    near = TransportConfig(outage_s=4.0)
    assert near.silence_s == 2.0
    assert replace(near, latency_s=2.0).silence_s == 6.0


def test_messages_that_are_expected_come_in_any_order_where_they_belong_and_in_time():
    with connected(timeout_s=2.0) as (first, second):
        memory = memoryview(bytearray(3))
        names = [Tag(0, 0, number) for number in range(4)]
        futures = [
            second.expect(0, "forward", name, waiting_for="it", accept=lambda size, words: memory if words else None)
            for name in names
        ]
        first.send(1, "forward", names[2], b"two")
        first.send(1, "forward", names[0], b"own", b"words")
        first.send(1, "forward", names[1], b"one")
        found = [future.result(60) for future in futures[:3]]
        assert [bytes(message.data) for message in found] == [b"own", b"one", b"two"]
        assert found[0].data is memory
        second.limit(0, "forward", names[3])
        with pytest.raises(RunError, match=r"it: waited for .*microbatch 3 from rank 0: it did not come within 2 s"):
            futures[3].result(60)


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
def test_a_message_that_is_expected_while_it_comes_in_goes_on_where_it_belongs(num_before):
    """Fragments that came before are copied there, and one that was on its way; where most have come it stays."""
    inbox = Inbox(TransportConfig(), Health(lambda reason: None), Clock(), allocate_bytes)
    channel, memory = Channel(0, "forward"), memoryview(bytearray(4))
    headers = [FragmentHeader(0, Tag(0, 0, 0), b"", 4, offset, 1, 0, 0, 0) for offset in range(4)]

    def come(number, place):
        place[:] = bytes([number])
        inbox.fill(channel, headers[number], place, 1, 1)

    for number in range(num_before):
        come(number, inbox.place(channel, headers[number], lambda: None))
    on_its_way = inbox.place(channel, headers[num_before], lambda: None)
    future = inbox.expect(channel, Tag(0, 0, 0), "it", lambda size, words: memory if size == 4 else None)
    come(num_before, on_its_way)
    for number in range(num_before + 1, 4):
        come(number, inbox.place(channel, headers[number], lambda: None))
    found = future.result(60)
    assert bytes(found.data) == bytes(range(4))
    assert (found.data is memory) == (num_before < 3)


def test_who_waits_for_a_message_to_arrive_wakes_once():
    outbox = Outbox(Channel(1, "forward"), TransportConfig(), 1, Health(lambda reason: None), Clock(), None)
    outbox.put(Tag(0, 0, 0), memoryview(bytes(3 << 20)), b"")
    frames, woken = [outbox.pull() for _ in range(3)], []
    outbox._arrived.notify_all = lambda: woken.append(len(frames))
    while frames:
        outbox.acknowledged(frames.pop())
    assert woken == [0]


def test_an_expected_message_of_a_rank_that_has_left_never_comes():
    with connected() as (first, second):
        future = second.expect(0, "forward", Tag(0, 0, 0), waiting_for="it")
        in_parallel(first.close, lambda: future.exception(60))
        with pytest.raises(PeerError, match="that rank has ended its work without sending it"):
            future.result(0)


def test_lent_memory_is_the_callers_again_though_nothing_of_it_was_taken():
    """By a copy, for the peer's buffer is full; what was written to it afterwards does not arrive."""
    with connected(buffer_bytes=1 << 20) as (first, second):
        memory = [bytearray(bytes([number]) * (3 << 20)) for number in range(2)]
        for number, own in enumerate(memory):
            loan = first.lend(1, "forward", Tag(0, 0, number), memoryview(own), b"")
            loan.end()
            own[:] = bytes(len(own))
        for number in range(2):
            found = second.receive(0, "forward", Tag(0, 0, number), waiting_for="it")
            assert bytes(found.data) == bytes([number]) * (3 << 20)


def test_a_fork_of_a_process_has_no_connections_and_breaks_none():
    with connected() as (first, second):
        child = os.fork()
        if not child:
            try:
                first.abort("a child")
                first.close()
                second.exchange("x", b"", waiting_for="x")
            except RunError as error:
                os._exit(0 if "forked process" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        first.send(1, "forward", Tag(0, 0, 0), b"1")
        assert second.receive(0, "forward", Tag(0, 0, 0), waiting_for="it").data == b"1"
