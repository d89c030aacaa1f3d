"""Peers that are let in where messages are encrypted, and the errors that the others get."""

import contextlib
import datetime
import os
import random
import select
import socket
import ssl
import stat
import sys
import time

import pytest
from cryptography import x509

from farpipe.core.errors import InputError, RunError
from farpipe.engine.transport import Rendezvous, Tag, TransportConfig, connect, handshake
from farpipe.engine.transport.connection import Connection
from farpipe.engine.transport.security import authority
from farpipe.engine.transport.security.authority import init, issue
from farpipe.engine.transport.security.tls import (
    KEY_FILE,
    Credentials,
    RefusedError,
    TlsFiles,
    check_address,
    check_site,
    secure,
)
from transports import MemoryStore, connected, in_parallel, tls_files
from waiting import wait_until

SITES = ("zurich", "lugano")
SSL_OP_ENABLE_KTLS = 8
"""OpenSSL's, which Python has a name for from 3.12 on."""


def config(files, sites=SITES, **settings):
    settings = {"timeout_s": 60.0, "connect_timeout_s": 100.0} | settings
    return TransportConfig(tls=files, sites=sites, **settings)


def both_errors(first, second):
    """Errors of each of two ranks, long before their time to connect is over."""
    store, start_s = MemoryStore(), time.monotonic()

    def one(rank, cfg):
        def call():
            with pytest.raises((RunError, InputError)) as caught:
                connect(rank, 2, cfg, Rendezvous(store, rank, 2)).close()
            return str(caught.value)

        return call

    found = in_parallel(one(0, first), one(1, second))
    assert time.monotonic() - start_s < 60, "the reason was known in a second"
    return found


@pytest.mark.parametrize("in_kernel", [False, True])
def test_everything_goes_through_tls_1_3_and_arrives(in_kernel, tmp_path, monkeypatch):
    """Also where OpenSSL is told to ask the kernel, whatever that says."""
    monkeypatch.setattr(ssl, "OP_ENABLE_KTLS", SSL_OP_ENABLE_KTLS if in_kernel else 0, raising=False)
    files = tls_files(tmp_path, SITES)
    assert bool(files[0].context(server=True).options & SSL_OP_ENABLE_KTLS) == in_kernel
    with connected(configs=[config(f) for f in files]) as (first, second):
        messages = [os.urandom(size) for size in (1, 40_000, 4_000_000)]
        for i, data in enumerate(messages):
            first.send(1, "forward", Tag(0, 0, i), data)
            second.send(0, "backward", Tag(0, 1, i), data)
        for i, data in enumerate(messages):
            assert second.receive(0, "forward", Tag(0, 0, i), waiting_for="it").data == data
            assert first.receive(1, "backward", Tag(0, 1, i), waiting_for="it").data == data
        parts = in_parallel(*(lambda r=r: r.exchange("x", bytes([r.rank]), waiting_for="x") for r in (first, second)))
        assert parts == [[b"\0", b"\1"]] * 2
        sockets = [line.stream._connection._sock for line in second._control.reconnectors.values()]
        sockets += [line.stream._connection._sock for box in first._outboxes.values() for line in box.reconnectors]
        assert len(sockets) >= 2
        assert {sock.version() for sock in sockets} == {"TLSv1.3"}


@contextlib.contextmanager
def connection_within_tls(folder):
    """A Connection and the socket at its other end."""
    near, far = socket.socketpair()
    near.settimeout(60)
    files, _ = tls_files(folder, SITES)
    contexts = [files.context(server=server) for server in (False, True)]
    near, far = in_parallel(
        lambda: secure(near, contexts[0], server=False), lambda: secure(far, contexts[1], server=True)
    )
    with near, far:
        yield Connection(near), far


def received(connection, num_bytes):
    """The next bytes, and in how many calls of Python."""
    calls, data = [], memoryview(bytearray(num_bytes))
    wait_until(lambda: select.select([connection.fd], [], [], 0)[0], "something had come")
    sys.setprofile(lambda frame, event, arg: calls.append(frame) if event == "call" else None)
    try:
        found = connection.receive_into(data)
    finally:
        sys.setprofile(None)
    return bytes(data[:found]), len(calls)


def test_records_of_tls_take_no_calls_of_python_each(tmp_path):
    with connection_within_tls(tmp_path) as (connection, far):
        for _ in range(100):
            far.sendall(b"x")
        data, num_calls = received(connection, 100)
        assert data == b"x" * 100
        assert num_calls < 10


def test_what_came_before_the_end_of_tls_is_received_and_then_the_end(tmp_path):
    """Without TLS's own goodbye, as where a process is killed."""
    with connection_within_tls(tmp_path) as (connection, far):
        far.sendall(b"goodbye")
        far.shutdown(socket.SHUT_RDWR)
        assert received(connection, 100)[0] == b"goodbye"
        with pytest.raises(handshake.ClosedError):
            connection.receive_into(memoryview(bytearray(100)))


def test_a_connection_within_tls_that_was_closed_here_has_ended(tmp_path):
    with connection_within_tls(tmp_path) as (connection, _):
        connection.close()
        with pytest.raises(handshake.ClosedError):
            connection.receive_into(memoryview(bytearray(100)))


def test_nothing_of_a_message_is_readable_on_the_way(tmp_path, monkeypatch):
    seen = []
    original = socket.socket.sendmsg
    monkeypatch.setattr(
        socket.socket, "sendmsg", lambda sock, parts: seen.extend(map(bytes, parts)) or original(sock, parts)
    )
    with connected(configs=[config(f) for f in tls_files(tmp_path, SITES)]) as (first, second):
        first.post(1, "secret", b"do not read this")
        first.send(1, "forward", Tag(0, 0, 0), b"1111")
        second.receive(0, "forward", Tag(0, 0, 0), waiting_for="it")
    assert seen == [], "something went around TLS"


@pytest.mark.slow
def test_a_certificate_of_another_site_is_refused_on_both_sides(tmp_path):
    zurich, _ = tls_files(tmp_path, SITES)
    acceptor, dialer = both_errors(config(zurich), config(zurich))
    for text in (acceptor, dialer):
        assert "it should be at site 'lugano', but its certificate is that of site 'zurich'" in text
        assert "farpipe certs issue" in text
    assert "rank 1 gave up: " in acceptor
    assert "connecting to rank 0 (site zurich)" in dialer


@pytest.mark.slow
def test_a_certificate_of_another_authority_is_refused_on_both_sides(tmp_path):
    ours = tls_files(tmp_path / "ours", SITES)
    theirs = tls_files(tmp_path / "theirs", SITES)
    acceptor, dialer = both_errors(config(ours[0]), config(theirs[1]))
    assert "rank 0 (site zurich)" in dialer
    assert "its certificate is not accepted here: " in dialer
    assert "rank 1 gave up: " in acceptor
    assert "it refused: it does not know the authority" in acceptor


@pytest.mark.slow
def test_an_expired_certificate_is_refused_on_both_sides(tmp_path, monkeypatch):
    zurich, lugano = tls_files(tmp_path, SITES)
    monkeypatch.setattr(authority, "_CLOCKS_DIFFER", datetime.timedelta(days=9))
    issue(tmp_path / "authority", "lugano", days=-1)
    acceptor, dialer = both_errors(config(zurich), config(lugano))
    assert "certificate has expired" in acceptor
    assert "rank 1 gave up: " in acceptor
    assert "it refused: this site's certificate has expired" in dialer
    assert "farpipe certs issue" in acceptor
    assert "farpipe certs issue" in dialer


@pytest.mark.slow
def test_a_side_without_certificates_and_the_other_are_told_at_the_meeting(tmp_path):
    zurich, lugano = tls_files(tmp_path, SITES)
    remedy = "start all ranks with --certs, or all with --allow-plaintext"
    for configs in ((config(zurich), config(None)), (config(None), config(lugano))):
        secured = 0 if configs[0].tls else 1
        for text in both_errors(*configs):
            assert f"rank {secured} has certificates and speaks TLS, rank {1 - secured} has none; {remedy}" in text


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_files_that_can_not_be_used_are_told_to_those_that_wait_at_the_meeting(tmp_path, rank):
    files = tls_files(tmp_path, SITES)
    files[rank].key.chmod(0o644)
    errors = both_errors(*map(config, files))
    assert "others than its owner may read this private key" in errors[rank]
    assert (
        f"rank {rank} gave up: {files[rank].key}: others than its owner may read this private key" in errors[1 - rank]
    )


def test_a_connection_without_a_certificate_is_turned_away(tmp_path):
    files = tls_files(tmp_path, SITES)
    with connected(configs=[config(f) for f in files]) as (first, _):
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection(first._dialler._ranks[0].address, timeout=60) as sock,
            secure(sock, bare, server=False) as secured,
            pytest.raises(RefusedError, match="it wants a certificate and got none"),
        ):
            handshake.offer(secured, handshake.Purpose(1, 0, None), b"token", 0)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection(first._dialler._ranks[0].address, timeout=60) as sock,
            pytest.raises(ssl.SSLError),
        ):
            old.wrap_socket(sock)
        first.send(1, "forward", Tag(0, 0, 0), b"1111")


def test_a_connection_that_is_closed_while_it_is_checked_is_an_error_of_the_network(tmp_path):
    """A rank that ends closes the connections that its threads are just admitting."""
    first, second = tls_files(tmp_path, SITES)
    ends = socket.socketpair()
    contexts = Credentials(first).context(server=True), Credentials(second).context(server=False)
    secured = in_parallel(*(lambda i=i: secure(ends[i], contexts[i], server=not i) for i in range(2)))
    check_site(secured[0], SITES[1])
    secured[1].close()
    secured[0].close()
    with pytest.raises(OSError, match="closed while its certificate was read"):
        check_site(secured[0], SITES[1])


@pytest.mark.slow
def test_a_certificate_may_be_limited_to_addresses(tmp_path):
    zurich, lugano = tls_files(tmp_path, SITES)
    issue(tmp_path / "authority", "zurich", ips=["192.0.2.7"])
    _, dialer = both_errors(config(zurich), config(lugano))
    assert "its certificate is for 192.0.2.7, not 127.0.0.1" in dialer
    issue(tmp_path / "authority", "zurich", ips=["192.0.2.7"], hosts=["localhost"])
    with connected(configs=[config(zurich), config(lugano)]):
        pass


def test_addresses_are_not_looked_at_without_tls():
    with socket.socket() as sock:
        check_address(sock, "192.0.2.1")


def test_an_authority_and_its_certificates_are_what_they_should_be(tmp_path):
    init(tmp_path, days=100)
    end = issue(tmp_path, "new york/2", hosts=["a.example"], ips=["10.0.0.1"], days=1000)
    files = TlsFiles.find(tmp_path, "new york/2")
    mine = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    root = x509.load_pem_x509_certificate(files.authority.read_bytes())
    assert end == root.not_valid_after_utc, "a certificate can't outlive its authority"
    mine.verify_directly_issued_by(root)
    names = mine.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.example"]
    assert mine.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert not any(ord(letter) < 32 for letter in str(files.key))
    for key in (files.key, tmp_path / "authority.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert not (files.key.parent / "authority.key").exists()


def test_an_authority_is_not_replaced_by_accident(tmp_path):
    init(tmp_path)
    with pytest.raises(InputError, match="has an authority already"):
        init(tmp_path)


@pytest.mark.parametrize("site", ["../other", "..", "/other", ""])
def test_a_certificate_stays_in_the_authority_folder(site, tmp_path):
    init(tmp_path / "authority")
    with pytest.raises(InputError, match="can't be a site's name"):
        issue(tmp_path / "authority", site)
    assert [path.name for path in tmp_path.iterdir()] == ["authority"]


def test_a_key_of_somebody_else_is_not_replaced(tmp_path):
    init(tmp_path)
    (tmp_path / "zurich").mkdir()
    (tmp_path / "zurich" / KEY_FILE).write_text("mine")
    with pytest.raises(InputError, match="is there already, and no key of this authority's"):
        issue(tmp_path, "zurich")
    assert (tmp_path / "zurich" / KEY_FILE).read_text() == "mine"
    issue(tmp_path, "lugano")
    issue(tmp_path, "lugano")


def test_issuing_without_an_authority_names_the_remedy(tmp_path):
    with pytest.raises(InputError, match=r"no authority: .*make one with `farpipe certs init"):
        issue(tmp_path, "zurich")


def test_a_folder_without_certificates_names_the_remedy(tmp_path):
    with pytest.raises(InputError, match=r"has no site.pem and no zurich/site.pem; make them with `farpipe certs"):
        TlsFiles.find(tmp_path, "zurich")


def test_a_key_that_others_may_read_is_refused(tmp_path):
    zurich, _ = tls_files(tmp_path, SITES)
    zurich.key.chmod(0o644)
    with pytest.raises(InputError, match=r"site.key: others than its owner may read this private key; chmod 600 it"):
        zurich.context(server=True)


def test_a_damaged_certificate_is_named(tmp_path):
    zurich, _ = tls_files(tmp_path, SITES)
    zurich.certificate.write_text("nothing")
    with pytest.raises(InputError, match="certificate and key can't be used"):
        zurich.context(server=False)


@pytest.mark.slow
def test_random_bytes_on_the_port_are_turned_away_and_hold_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(handshake, "LIMIT_S", 1.0)
    with connected(configs=[config(f) for f in tls_files(tmp_path, SITES)]) as (first, second):
        silent = socket.create_connection(second._dialler._ranks[1].address, timeout=60)
        with silent, socket.create_connection(second._dialler._ranks[1].address, timeout=60) as stranger:
            stranger.sendall(random.Random(60).randbytes(60))
            first.send(1, "forward", Tag(0, 0, 0), b"1111")
            assert second.receive(0, "forward", Tag(0, 0, 0), waiting_for="it").data == b"1111"
            for sock in (stranger, silent):
                sock.settimeout(60)
                with contextlib.suppress(ConnectionError):
                    while sock.recv(4096):  # TimeoutError where it is not closed
                        pass


def test_a_renewed_certificate_is_taken_at_the_next_connection(tmp_path):
    files = tls_files(tmp_path, SITES)
    with connected(configs=[config(f, connect_timeout_s=60) for f in files]) as (_, second):
        stream = second._control.reconnectors[0].stream  # the higher rank dials: the lower one is the server

        def shown_by_first():
            return stream._connection._sock.getpeercert()["serialNumber"]

        before = shown_by_first()
        issue(tmp_path / "authority", SITES[0])
        stream.break_off(OSError("broken off by the test"))
        wait_until(lambda: stream.is_up, "the connection was made anew")
        assert shown_by_first() != before


def test_files_that_are_just_being_copied_do_not_replace_the_good_ones(tmp_path):
    files, _ = tls_files(tmp_path, SITES)
    credentials = Credentials(files)
    before = credentials.context(server=True)
    assert credentials.context(server=True) is before, "nothing has changed"
    good = files.certificate.read_bytes()
    files.certificate.write_bytes(good[: len(good) // 2])
    assert credentials.context(server=True) is before
    files.certificate.unlink()
    assert credentials.context(server=True) is before
    files.certificate.write_bytes(good)
    assert credentials.context(server=True) not in (None, before)
