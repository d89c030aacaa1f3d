"""Ranks as threads of this process: a stand-in for the transport that makes tests of the engine fast."""

import threading
import time
from collections import defaultdict

import torch

from farpipe.core.errors import RunError
from farpipe.engine.executor.peers import TensorMessage
from farpipe.engine.transport import MessageTimes
from farpipe.engine.transport.clock import Clock


class Switchboard:
    """State that the ranks share: messages in transit, boxes, and the first failure."""

    def __init__(self, world_size, timeout_s=60.0):
        self.world_size, self.timeout_s = world_size, timeout_s
        self.condition = threading.Condition()
        self.messages, self.exchanges, self.boxes = {}, defaultdict(dict), defaultdict(list)
        self.failure = None

    def put(self, table, key, value):
        with self.condition:
            assert key not in table, f"{key} is sent twice"
            table[key] = value
            self.condition.notify_all()

    def wait(self, ready, waiting_for):
        deadline = time.monotonic() + self.timeout_s
        with self.condition:
            while not (result := ready()):
                if self.failure is not None:
                    raise RunError(self.failure)
                if not self.condition.wait(deadline - time.monotonic()):
                    raise RunError(f"waited {self.timeout_s:g} s for {waiting_for}")
            return result


class InProcessPeers:
    """One rank's view of a Switchboard; has the methods of the transport that the engine uses."""

    def __init__(self, board, rank, late_s=0.0):
        """`late_s`: time that gradients and weights of other replicas take to be delivered here."""
        self.board, self.rank, self.world_size, self.clock = board, rank, board.world_size, Clock()
        self.late_s = late_s

    def send(self, peer, kind, tag, tensor):
        sent = (tensor.detach(), tensor.detach().clone(), self.clock.now_ns())
        self.board.put(self.board.messages, (self.rank, peer, kind, tag), sent)

    def receive(self, peer, kind, tag, *, waiting_for):
        key = (peer, self.rank, kind, tag)
        time.sleep(self.late_s if kind == "sync" else 0.0)
        sent, tensor, ready_ns = self.board.wait(
            lambda: self.board.messages.pop(key, None), f"{waiting_for} from {peer}"
        )
        # the transport sends the memory itself, perhaps late and more than once
        assert torch.equal(sent.nan_to_num(), tensor.nan_to_num()), f"{key} was written to after it had been sent"
        now_ns = self.clock.now_ns()
        return TensorMessage(tensor, MessageTimes(ready_ns, ready_ns, now_ns, now_ns))

    def exchange(self, name, payload, *, waiting_for):
        found = self.board.exchanges[name]
        self.board.put(found, self.rank, payload)
        self.board.wait(lambda: len(found) == self.world_size, waiting_for)
        return [found[rank] for rank in range(self.world_size)]

    def post(self, peer, name, payload):
        with self.board.condition:
            self.board.boxes[peer, name].append((self.rank, payload))

    def poll(self, name):
        with self.board.condition:
            return self.board.boxes.pop((self.rank, name), [])

    def paused_s(self):
        return 0.0

    def take_events(self):
        return []

    def clock_offsets(self):
        return [0] * self.world_size

    def abort(self, reason):
        with self.board.condition:
            self.board.failure = self.board.failure or reason
            self.board.condition.notify_all()


def run_ranks(world_size, work, timeout_s=60.0, late_s=()):
    """`work(peers)` in one thread per rank; their results by rank, or the first error that one of them raised.

    `late_s`: seconds by rank, see InProcessPeers.
    """
    board = Switchboard(world_size, timeout_s)
    results, errors = [None] * world_size, []

    def body(rank):
        peers = InProcessPeers(board, rank, dict(late_s).get(rank, 0.0))
        try:
            results[rank] = work(peers)
        except BaseException as error:
            errors.append(error)
            peers.abort(str(error))

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 10)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results
