"""Slices of a model, one per stage: which layers, and what every stage asks of the module that computes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from farpipe.core.errors import InputError
from farpipe.engine.stages.balancing import Balancing
from farpipe.engine.stages.chunk_attention import ChunkPass


@dataclass(frozen=True)
class StageSlice:
    """Layers ``first_layer <= i < end_layer`` with the embedding before and the head behind them, or not."""

    first_layer: int
    end_layer: int
    has_embedding: bool
    has_head: bool


def slices(partition: tuple[tuple[int, int], ...]) -> list[StageSlice]:
    """One slice per stage: the embedding goes with the first, the head with the last."""
    last = len(partition) - 1
    return [StageSlice(first, end, stage == 0, stage == last) for stage, (first, end) in enumerate(partition)]


class SliceModule(nn.Module):
    """Module of one stage: tokens or activations -> activations or logits.

    Its parameters have the names of the whole model, whatever the slice, and the dtype that it computes in.
    """

    def __init__(self, part: StageSlice) -> None:
        super().__init__()
        self.part = part

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Its layers, which may be gathered one at a time; none where they are not known."""
        return []

    @property
    def end_weights(self) -> dict[str, nn.Parameter]:
        """``embedding`` and ``head``: matrices that a model may tie, as far as the slice has them."""
        return {}

    @property
    def balancing(self) -> Balancing | None:
        """The loss that balances its experts; None without one."""
        return None

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are not frozen, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    @property
    def shared_names(self) -> dict[str, str]:
        """The name of the embedding's matrix by that of the head's, where the whole model ties them."""
        return {}

    def prepare_chunks(self) -> None:
        """Get ready for `on_chunk`; InputError where that is not known."""
        what = "a module of your own (model.module)"
        raise InputError(f"data.packing: {what} can't be trained on chunks; leave data.packing out")

    def on_chunk(self, x: Tensor, chunk: ChunkPass) -> Tensor:
        """[1, tokens] or [1, tokens, hidden] -> [1, tokens, hidden], without the head, whose output is `logits`."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> [b, s, vocab]."""
        raise NotImplementedError


class ModuleSlice(SliceModule):
    """Any module as the slice of a model; its parameters keep the names that they have in `inner`."""

    def __init__(self, inner: nn.Module, part: StageSlice) -> None:
        super().__init__(part)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations -> activations or logits."""
        y: Tensor = self.inner(x)
        return y

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with their names in `inner`; of its own (``recurse=False``) it has none."""
        return self.inner.named_parameters(prefix, recurse, remove_duplicate) if recurse else iter(())

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Its layers, where they are a list called ``layers``."""
        layers = getattr(self.inner, "layers", None)
        return list(layers) if isinstance(layers, nn.ModuleList) else []
