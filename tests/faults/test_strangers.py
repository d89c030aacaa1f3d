"""Strangers at every port of a training within TLS: they are turned away, and the training does not notice.

For how long each is listened to: tests/engine/transport/test_strangers.py and test_tls_limits.py.
"""

import contextlib
import os
import random
import socket
import ssl
import threading
import time

import pytest

from farpipe.engine.launch.run import run
from farpipe.engine.transport import handshake
from farpipe.engine.transport.security.tls import TlsFiles
from proxies import free_port
from trainings import equal_states, losses, state
from transports import tls_files

pytestmark = pytest.mark.slow

SITES = ("site0", "site1")


class Strangers:
    """One thread of each kind for every address, where it comes again and again until the end."""

    def __init__(self, addresses, own_files, other_files):
        self.own_files, self.other_files = own_files, other_files
        self.over, self.let_in = threading.Event(), []
        self.visits = {(kind, address): 0 for kind in KINDS for address in addresses}
        for kind, address in self.visits:
            threading.Thread(target=self.come, args=(kind, address), daemon=True).start()

    def come(self, kind, address):
        while not self.over.wait(0.1):
            turned_away = (OSError, handshake.HandshakeError)
            with contextlib.suppress(*turned_away), socket.create_connection(address, timeout=5) as sock:
                self.visits[kind, address] += 1
                if getattr(self, kind)(sock):
                    self.let_in.append(kind)

    def random_bytes(self, sock):
        sock.sendall(random.randbytes(random.choice([1, 60, 5000])))
        self.wait_for_end(sock)

    def plain_hello(self, sock):
        """The first message of a rank without TLS."""
        handshake.offer(sock, handshake.Purpose(0, 1, None), os.urandom(32), 0)
        return True

    def certificate_of_another_authority(self, sock):
        with self.other_files.context(server=False).wrap_socket(sock) as secure:
            return bool(secure.recv(1))

    def right_certificate_without_the_token(self, sock):
        """The site itself, but not this run."""
        with self.own_files.context(server=False).wrap_socket(sock) as secure:
            handshake.offer(secure, handshake.Purpose(0, 1, "forward"), os.urandom(32), 0)
            return True

    def no_certificate(self, sock):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with context.wrap_socket(sock) as secure:
            return bool(secure.recv(1))

    def half_open(self, sock):
        """A crowd that says nothing, for longer than anybody has to wait for it."""
        with contextlib.ExitStack() as crowd:
            for _ in range(40):
                crowd.enter_context(socket.create_connection(sock.getpeername(), timeout=5))
            self.wait_for_end(sock)

    def slow_loris(self, sock):
        """A byte of a TLS hello now and then."""
        sock.settimeout(0.1)
        for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200):
            sock.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1):
                    return

    def wait_for_end(self, sock):
        sock.settimeout(handshake.LIMIT_S * 3)
        while sock.recv(4096):
            pass


KINDS = [name for name in vars(Strangers) if not name.startswith("_") and name not in ("come", "wait_for_end")]


def test_strangers_at_every_port_change_nothing(make, undisturbed, program, proxy, tmp_path):
    """While they crowd the port the proxy breaks all connections, and then again and again: new ones have to be made.

    They come to the meeting point as well, from before the ranks meet; it is PyTorch's and not within TLS.
    """
    for folder in ("authority", "other"):
        (tmp_path / folder).mkdir()
        tls_files(tmp_path / folder, SITES)
    own, other = (TlsFiles.find(tmp_path / folder / "authority", "site0") for folder in ("authority", "other"))
    rank_program = program("--certs", tmp_path / "authority" / "authority", proxy=proxy.answer_routes(), pause_s=0.1)
    master = "127.0.0.1", free_port()
    crowds, broken = [Strangers([master], own, other)], []

    def on_step(line):
        if line["step"] == 2:
            broken.extend(proxy.open)
            crowds.append(Strangers(proxy.ports.values(), own, other))
            time.sleep(1)
            proxy.mean_bytes = 300_000
            proxy.cut_all()

    start_s = time.monotonic()
    spec = make(2)
    try:
        run(spec, tmp_path / "run", on_step=on_step, rank_program=rank_program, master_port=master[1])
    finally:
        for strangers in crowds:
            strangers.over.set()
    assert time.monotonic() - start_s < 200
    expected_losses, expected_state = undisturbed(2)
    assert losses(tmp_path / "run") == expected_losses
    assert equal_states(state(tmp_path / "run", spec), expected_state)
    for strangers in crowds:
        assert strangers.let_in == []
        assert all(strangers.visits.values()), strangers.visits
    assert len(broken) >= 4, "no connection had to be made anew while they were there"
