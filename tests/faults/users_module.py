"""A module of a user's that does what FARPIPE_TEST_MODE says, in the forward of the last stage's sixth microbatch."""

import atexit
import os
import sys
import threading
import time

import torch
from torch import nn

MODE = os.environ.get("FARPIPE_TEST_MODE", "")


class Exploding(nn.Module):
    """A small slice, with a fault."""

    def __init__(self, part):
        super().__init__()
        self.part, self.calls = part, 0
        self.table = nn.Embedding(256, 16) if part.has_embedding else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(part.first_layer, part.end_layer))
        self.head = nn.Linear(16, 256) if part.has_head else nn.Identity()

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        if self.part.has_head and self.calls == 6:
            getattr(self, MODE, lambda x: None)(x)
        y = self.table(x)
        for layer in self.layers:
            y = y + layer(y)
        y = self.head(y)
        if self.part.has_head and self.calls == 6:
            return y[:, :-1] if MODE == "shorter" else y
        return y

    def none(self, x):
        return None.dtype

    def leaves(self, x):
        sys.exit(0)

    def interrupts(self, x):
        raise KeyboardInterrupt

    def forks_and_raises(self, x):
        child = os.fork()
        if not child:
            raise ValueError("in the child")
        os.waitpid(child, 0)

    def forks_and_goes_on(self, x):
        child = os.fork()
        if child:
            os.waitpid(child, 0)

    def leaves_a_thread(self, x):
        threading.Thread(target=time.sleep, args=(600,), name="uploads").start()

    def hangs_at_exit(self, x):
        atexit.register(time.sleep, 600)

    def hangs_at_the_very_end(self, x):
        class Held:
            def __del__(self, sleep=time.sleep):
                sleep(600)

        sys.modules["held at the end"] = Held()


def build(part):
    """A slice."""
    return Exploding(part)
