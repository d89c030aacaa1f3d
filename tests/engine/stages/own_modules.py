"""Functions that ``[model] module`` may name, good and bad ones."""

from torch import nn
from torch.nn import functional


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


def without_dropout(part):
    """A slice that drops nothing out."""
    module = Stack(part)
    for layer in module.layers.values():
        layer[1] = nn.Identity()
    return module


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


class Tuples(Stack):
    """Layers that return tuples to each other."""

    def __init__(self, part):
        super().__init__(part)
        for layer in self.layers.values():
            layer.register_forward_hook(lambda _, __, y: (y,))


def tuples(part):
    """A module that breaks in its forward."""
    return Tuples(part)


def narrow(part):
    """A module with too few logits."""
    module = Stack(part)
    module.head = nn.Linear(16, 100) if part.has_head else module.head
    return module


class Dropping(Stack):
    """Layers with a dropout that is on in evaluation too."""

    def forward(self, x):
        return functional.dropout(super().forward(x), training=True)


def dropping(part):
    """A module that draws random numbers."""
    return Dropping(part)


def without_layers(part):
    """A module that does not say what its layers are."""
    return nn.Linear(16, 16)
