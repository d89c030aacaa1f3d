"""Within TLS: clocks that differ by seconds, and strangers who drip bytes."""

import contextlib
import datetime
import socket
import time
from types import SimpleNamespace

import pytest

from farpipe.core.errors import RunError
from farpipe.engine.transport import Rendezvous, Tag, TransportConfig, connect, handshake
from farpipe.engine.transport.security import authority
from transports import MemoryStore, connected, in_parallel, tls_files

SITES = ("zurich", "lugano")


def issued_by_a_clock_ahead(folder, ahead, monkeypatch):
    """Certificates of both sites, made on a machine whose clock is ahead of this one's."""

    clock = SimpleNamespace(now=lambda zone: datetime.datetime.now(zone) + ahead)
    others = {name: getattr(datetime, name) for name in ("UTC", "timedelta")}
    with monkeypatch.context() as patch:
        patch.setattr(authority, "datetime", SimpleNamespace(datetime=clock, **others))
        return tls_files(folder, SITES)


def configs(files):
    return [TransportConfig(tls=own, sites=SITES, timeout_s=10.0, connect_timeout_s=1.5) for own in files]


def test_a_certificate_made_by_a_clock_that_is_seconds_ahead_is_good_at_once(tmp_path, monkeypatch):
    files = issued_by_a_clock_ahead(tmp_path, datetime.timedelta(seconds=30), monkeypatch)
    with connected(configs=configs(files)) as (first, second):
        first.send(1, "forward", Tag(0, 0, 0), b"1111")
        assert second.receive(0, "forward", Tag(0, 0, 0), waiting_for="it").data == b"1111"


@pytest.mark.slow
def test_one_made_by_a_clock_that_is_a_day_ahead_is_refused_with_the_reason(tmp_path, monkeypatch):
    files = issued_by_a_clock_ahead(tmp_path, datetime.timedelta(days=1), monkeypatch)
    store = MemoryStore()

    def one(rank, config):
        with pytest.raises(RunError) as caught:
            connect(rank, 2, config, Rendezvous(store, rank, 2)).close()
        return str(caught.value)

    texts = in_parallel(*(lambda rank=rank: one(rank, configs(files)[rank]) for rank in range(2)))
    assert any("its certificate is not accepted here: certificate is not yet valid" in text for text in texts), texts


@pytest.mark.slow
def test_bytes_of_a_tls_hello_that_drip_do_not_prolong_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(handshake, "LIMIT_S", 1.0)
    with connected(configs=configs(tls_files(tmp_path, SITES))) as (first, second):
        with socket.create_connection(second._dialler._ranks[1].address, timeout=5) as stranger:
            stranger.settimeout(0.05)
            begin_s = time.monotonic()
            with contextlib.suppress(ConnectionError):
                for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200):
                    stranger.sendall(bytes([byte]))
                    with contextlib.suppress(TimeoutError):
                        if not stranger.recv(1):
                            break
            assert time.monotonic() - begin_s < 10.5, "it was still listened to"
        first.send(1, "forward", Tag(0, 0, 0), b"1111")
        assert second.receive(0, "forward", Tag(0, 0, 0), waiting_for="it").data == b"1111"
