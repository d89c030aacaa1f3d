"""Megatron-Core's 1F1B over the backend "farpipe" on a CPU: largest error of a gradient on each pipeline rank.

    torchrun --nproc-per-node 3 -m benchmarks.engine.megatron_core

Needs megatron-core. A stage is a linear layer and a tanh in float64. What Megatron-Core asks of a GPU is replaced.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import farpipe.torch

WIDTH, ROWS, NUM_MICROBATCHES = 8, 4, 6


def help_cpu() -> None:
    """Let Megatron-Core make its buffers in CPU memory."""
    zeros: Any = torch.zeros
    torch.zeros = lambda *size, device=None, **more: zeros(*size, device="cpu" if device == "cuda" else device, **more)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None


def layer(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


class Part(nn.Module):
    """A stage as Megatron-Core's schedules take it."""

    model_type = "encoder_or_decoder"

    def __init__(self, stage: int, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer(stage), config
        self.received: Tensor | None = None

    def set_input_tensor(self, found: Any) -> None:
        self.received = found[0] if isinstance(found, list) else found

    def forward(self, x: Tensor) -> Any:
        return self.layer(x if self.received is None else self.received)


def main() -> None:
    help_cpu()
    from megatron.core import ModelParallelConfig
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
    from megatron.core.process_groups_config import ProcessGroupCollection

    dist.init_process_group("gloo")
    me, size = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroupCollection()
    groups.pp, alone = dist.group.WORLD, [dist.new_group([rank]) for rank in range(size)][me]
    groups.tp = groups.cp = groups.dp_cp = groups.embd = groups.pos_embd = alone
    config = ModelParallelConfig(pipeline_model_parallel_size=size, pipeline_dtype=torch.float64, batch_p2p_comm=True)
    config.hidden_size, config.fine_grained_activation_offloading = WIDTH, False
    part = Part(me, config)
    torch.manual_seed(1000)
    batch = torch.randn(NUM_MICROBATCHES, ROWS, 1, WIDTH, dtype=torch.float64)

    def forward(microbatches: Iterator[Tensor], model: Any) -> Any:
        output = model(next(microbatches))
        return output, lambda found: (found.square().sum(), {})

    forward_backward_pipelining_without_interleaving(
        forward_step_func=forward,
        data_iterator=iter(batch),
        model=part,
        num_microbatches=NUM_MICROBATCHES,
        seq_length=ROWS,
        micro_batch_size=1,
        forward_only=False,
        **farpipe.torch.megatron(config, groups),
    )
    whole = nn.Sequential(*map(layer, range(size)))
    (whole(batch).square().sum() / NUM_MICROBATCHES).backward()
    pairs = zip(part.parameters(), whole[me].parameters(), strict=True)
    error = max(float((one.grad - other.grad).abs().max()) for one, other in pairs)  # type: ignore[operator,union-attr]
    print(f"rank {me} of {size}: {error:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
