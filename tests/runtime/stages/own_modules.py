"""Functions that ``[model] module`` may name, good and bad ones."""

from torch import nn


class Stack(nn.Module):
    """A stack of gated layers, with names as in the whole."""

    def __init__(self, part):
        super().__init__()
        self.table = nn.Embedding(256, 16) if part.has_embedding else nn.Identity()
        self.layers = nn.ModuleDict()
        for number in range(part.first_layer, part.end_layer):
            self.layers[str(number)] = nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.SiLU())
        self.head = nn.Linear(16, 256) if part.has_head else nn.Identity()

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers.values():
            x = x + layer(x)
        return self.head(x)


def build(part):
    """A slice."""
    return Stack(part)


def broken(part):
    """Raise."""
    raise RuntimeError(f"no layer {part.first_layer}")


def no_module(part):
    """Something else."""
    return part


class Counting(Stack):
    """Layers that count their microbatches."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


def counting(part):
    """A module with a state."""
    return Counting(part)


class Pair(Stack):
    """Layers that return a tuple."""

    def forward(self, x):
        return super().forward(x), None


def pair(part):
    """A module of another kind of output."""
    return Pair(part)


def without_layers(part):
    """A module that does not say what its layers are."""
    return nn.Linear(16, 16)
