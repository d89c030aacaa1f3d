"""Trainings that publish, for tests: their processes as objects of this one, whose weights the test changes."""

from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import farpipe.torch
from farpipe.core.spec.publish import PublishSettings
from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.publish.publisher import PUBLISH, Publisher
from farpipe.engine.transport import TransportConfig
from in_process import InProcessPeers, Switchboard
from trainings import make_run
from transports import in_parallel
from waiting import wait_until

SHAPES = {"embedding.weight": (40, 16), "norm.gain": (16,), "head.weight": (40, 16)}


class Training:
    """Processes that have a part of the weights in SHAPES each; the first half of every tensor, and the second."""

    def __init__(self, folder: Path, *, num_processes=2, config=None, precision="bf16", change=lambda run: run, **keys):
        """`change` is applied to the run, and `keys` are those of [publish]."""
        (folder / "text").write_text("text " * 200)
        placement = tuple(range(num_processes))
        settings = {"publish": PublishSettings(**{"every_steps": 1} | keys)}
        self.run = change(make_run(folder / "text", placement=placement, precision=precision, run_fields=settings))
        self.whole = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.folder, board = folder, Switchboard(num_processes)
        self.peers = [InProcessPeers(board, rank) for rank in placement]
        config = config or TransportConfig()
        self.publishers = in_parallel(*(partial(self.publisher, rank, config) for rank in placement))

    def publisher(self, rank, config):
        return Publisher(self.run, self.peers[rank], lambda: self.pieces(rank), self.folder, config=config)

    def pieces(self, rank):
        """Rows as boxes; of what has one dimension, runs. The first process has all of the gains, and no moments."""
        found, count = [], len(self.peers)
        for name, tensor in self.whole.items():
            size = len(tensor) // count
            part = tensor[rank * size : (rank + 1) * size]
            start = rank * size
            if tensor.ndim == 1:
                found.append(Piece(f"weight/{name}", tuple(tensor.shape), start, part))
            else:
                found.append(Piece(f"weight/{name}", tuple(tensor.shape), 0, part, offset=(start, 0)))
            found.append(Piece(f"exp_avg/{name}", tuple(tensor.shape), start * tensor[0].numel(), part.reshape(-1)))
        return found

    def step(self, number, share=1.0):
        """Change a share of the weights in step `number`, and publish as soon as nobody asks for the version before."""
        wait_until(lambda: self.publishers[0]._served.shelf.may_change, "nobody asks")
        generator = torch.Generator().manual_seed(number)
        for tensor in self.whole.values():
            changed = torch.rand(tensor.shape, generator=generator) < share
            tensor += changed * torch.randn(tensor.shape, generator=generator)
        commands = set()
        self.publishers[0].before_exchange(number, lambda step, command: commands.add(command))
        for publisher in self.publishers:
            publisher.after_exchange(number, commands, 0.1)
        assert PUBLISH in commands

    def published(self, dtype=torch.bfloat16):
        return {name: tensor.to(dtype) for name, tensor in self.whole.items()}

    def finish(self):
        in_parallel(*(publisher.finish for publisher in self.publishers))

    def close(self):
        in_parallel(*(publisher.close for publisher in self.publishers))


@contextmanager
def training(folder, **options):
    """A Training in `folder`, closed at the end."""
    found = Training(folder, **options)
    try:
        yield found
    finally:
        found.close()


def subscription(folder, **options):
    """A subscription that gives up soon."""
    return farpipe.torch.subscribe(folder, **{"patience_s": 20.0} | options)


def equal(weights, expected):
    """True if a version's tensors are these, to the last bit."""
    found = weights._received.tensors
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
