"""A TCP proxy between the ranks of a run, which breaks, blocks and swallows what goes through it."""

import contextlib
import random
import socket
import struct
import threading

RESET = struct.pack("ii", 1, 0)


def free_port():
    """A port to listen on later: below those that the system gives to others in the meantime (32768 and more)."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000))) as free,
        ):
            return free.getsockname()[1]


class Proxy:
    """Stands between the ranks; breaks every connection after a random number of bytes while `mean_bytes` is set."""

    def __init__(self, seed=0):
        self.random, self.mean_bytes, self.num_cuts = random.Random(seed), None, 0
        self.blocked = self.swallows = False
        self.lock, self.open, self.ports, self.listeners = threading.Lock(), set(), {}, []

    def route(self, address):
        """The address to dial instead of `address`."""
        with self.lock:
            if address not in self.ports:
                listener = socket.create_server(("127.0.0.1", 0), backlog=256)
                self.listeners.append(listener)
                self.ports[address] = listener.getsockname()
                threading.Thread(target=self.serve, args=(listener, address), daemon=True).start()
            return self.ports[address]

    def answer_routes(self):
        """For ranks that are processes: the port where a line ``HOST PORT`` is answered with the port to dial."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.listeners.append(listener)

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as asking:
                        host, port = asking.makefile().readline().split()
                        asking.sendall(f"{self.route((host, int(port)))[1]}\n".encode())

        threading.Thread(target=answer, daemon=True).start()
        return listener.getsockname()[1]

    def serve(self, listener, address):
        while True:
            try:
                near = listener.accept()[0]
            except OSError:
                return
            try:
                far = None if self.blocked else socket.create_connection(address)
            except OSError:
                far = None
            if far is None:
                near.close()
                continue
            pair = (near, far)
            self.open.add(pair)
            left = [self.random.expovariate(1 / self.mean_bytes) if self.mean_bytes else 1 << 60]
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in (pair, pair[::-1]):
                threading.Thread(target=self.pump, args=(*ends, left, pair), daemon=True).start()

    def pump(self, source, sink, left, pair):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.swallows:
                    continue
                part = data[: max(0, int(left[0]))]
                left[0] -= len(data)
                sink.sendall(part)
                if left[0] <= 0:
                    break
        self.cut(pair)

    def cut(self, pair):
        with self.lock:
            if pair not in self.open:
                return
            self.open.remove(pair)
            self.num_cuts += 1
            abruptly = self.random.random() < 0.5
        for sock in pair:
            with contextlib.suppress(OSError):
                if abruptly:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def cut_all(self):
        for pair in list(self.open):
            self.cut(pair)

    def close(self):
        for listener in self.listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut_all()
