"""Any PyTorch module as a stage."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from farpipe.engine.stages.deferred import WeightGradStore, defer
from farpipe.engine.stages.slices import StageSlice
from farpipe.engine.stages.stage import Boundary, TorchStage


class ModuleSlice(nn.Module):
    """Any module as the slice of a model; its parameters keep the names that they have in `inner`."""

    def __init__(self, inner: nn.Module, part: StageSlice) -> None:
        super().__init__()
        self.inner, self.part = inner, part

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or activations -> activations or logits."""
        y: Tensor = self.inner(x)
        return y

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with their names in `inner`; of its own (``recurse=False``) it has none."""
        return self.inner.named_parameters(prefix, recurse, remove_duplicate) if recurse else iter(())

    casts_weights = False

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Its layers, which may be gathered one at a time; none where it has no list of them."""
        layers = getattr(self.inner, "layers", None)
        return list(layers) if isinstance(layers, nn.ModuleList) else []

    @property
    def shared_names(self) -> dict[str, str]:
        """None: stages share nothing."""
        return {}

    @property
    def end_weights(self) -> dict[str, nn.Parameter]:
        """None: what a module ties inside one stage needs no help."""
        return {}

    def forget_casts(self) -> None:
        """Do nothing: nothing is cast."""


class ModuleStage(TorchStage):
    """A TorchStage over any module, whose weight gradients wait for W.

    The module takes one tensor and gives one; that of the last stage gives logits [..., classes].
    """

    module: ModuleSlice

    def __init__(
        self,
        module: ModuleSlice,
        boundary: Boundary,
        device: torch.device | str = "cpu",
    ) -> None:
        store = WeightGradStore()
        defer(module, store)
        super().__init__(module.to(device), store, boundary, device)
