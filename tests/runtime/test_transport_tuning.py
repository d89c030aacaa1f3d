import socket

import pytest

from farpipe.runtime.transport import tuning
from farpipe.runtime.transport.tuning import choose_streams, default_num_threads, round_trip_s
from transports import connected


@pytest.mark.parametrize(
    ("round_trip", "bytes_per_s", "num_streams"),
    [(0.0, 125e6, 2), (0.001, 125e6, 2), (0.050, 125e6, 4), (0.100, 125e6, 7), (0.100, 1.25e9, 64), (0.2, None, 64)],
)
def test_streams_grow_with_what_is_on_the_way(monkeypatch, round_trip, bytes_per_s, num_streams):
    monkeypatch.setattr(tuning, "send_buffer_limit_bytes", lambda: 4 << 20)
    assert choose_streams(round_trip, bytes_per_s) == num_streams


def test_smaller_buffers_need_more_streams():
    assert choose_streams(0.05, 125e6, buffer_bytes=1 << 20) > choose_streams(0.05, 125e6, buffer_bytes=4 << 20)


def test_the_round_trip_of_a_connection_is_the_kernels():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        assert 0 < round_trip_s(sock) < 1


def test_few_cores_are_left_to_computing():
    assert 1 <= default_num_threads() <= 4


def test_a_channel_has_the_streams_that_its_link_asks_for(monkeypatch):
    monkeypatch.setattr(tuning, "send_buffer_limit_bytes", lambda: 4 << 20)
    with connected(bandwidths={(0, 1): 125e6}) as (first, _):
        first._round_trips_s[1] = 0.05
        first.open(1, "forward")
        (outbox,) = first._outboxes.values()
        assert len(outbox._lifelines) == 4
