"""Bytes of weights, gradients and Adam's state on one device, by torch's own sharding and by the cost model.

One step (F, I, W, the reduction, AdamW) of a first, a middle and a last stage of Llama 3 70B and 405B, eight layers
each, runs as process 0 of 64 that are not there: torch's fake process group and fake tensors, which have shapes and
storages but no memory. Tensor parallelism divides the layers as `farpipe.engine.site` does, FSDP2 the rest, in bf16
with float32 sums. Gathered weights are counted after the forward, gradients after W, each storage once; then what
ZeRO-3 keeps between microbatches: shards of all. In brackets (predicted - measured) / measured. No GPU, half a minute.

    python -m benchmarks.cost_model.divided_state
"""

import warnings
from collections.abc import Iterable
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from farpipe.core.spec import Model, Training
from farpipe.core.spec.hugging_face import config_of
from farpipe.core.spec.load import preset_model
from farpipe.engine.data.batches import Batch
from farpipe.engine.site.mesh import DATA, TENSOR, stage_mesh
from farpipe.engine.site.sharding import StepReduction, shard
from farpipe.engine.site.tensor_plans import divide
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, build
from farpipe.engine.stages.slices import StageSlice
from farpipe.engine.stages.stage import Boundary, TorchStage
from farpipe.engine.stages.weight_grads import local_part
from farpipe.planning.cost import Layout, memory
from farpipe.planning.cost.stage import stage_params

NUM_PROCESSES, LENGTH, NUM_LAYERS = 64, 1024, 8
NAMES = ("llama-3-70b", "llama-3-405b")
ENDS = {"first": (True, False), "middle": (False, False), "last": (False, True)}
DEGREES = ((64, 1), (16, 4), (8, 8))
"""Replicas that share weights, tensor-parallel processes."""
TRAINING = Training(sequence_length=LENGTH, global_batch=64, microbatch_size=1, precision="bf16")


def main() -> None:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_PROCESSES)
    print(
        "| model, stage | FSDP x tensor | weights, GB | gradients, GB | state, GB | ZeRO-3: all, GB |\n"
        + "|---" * 6
        + "|"
    )
    worst = 0.0
    for name, (stage, ends), (data, tensor) in product(NAMES, ENDS.items(), DEGREES):
        case = preset_model(name), ends, data, tensor
        found, planned = measured(*case), predicted(*case)
        errors = [one / other - 1 for one, other in zip(planned, found, strict=True)]
        worst = max(worst, *map(abs, errors[:3]))
        cells = " | ".join(f"{one / 1e9:.3f} ({error:+.2%})" for one, error in zip(found, errors, strict=True))
        print(f"| {name}, {stage} | {data} x {tensor} | {cells} |", flush=True)
    print(f"\nlargest error of weights, gradients and state: {worst:.2%}")


def predicted(model: Model, ends: tuple[bool, bool], data: int, tensor: int) -> list[float]:
    """Bytes of weights, gradients and state with ZeRO-1, and of all three with ZeRO-3, by the cost model."""
    layout = Layout(pipeline=1, data=data, tensor=tensor, virtual=1, microbatch_size=1, num_microbatches=1)
    num_params = stage_params(model, NUM_LAYERS, embedding=ends[0], head=ends[1]) / tensor
    parts = [memory.weight_bytes(TRAINING), memory.gradient_bytes(TRAINING), memory.optimizer_bytes("bf16") / data]
    zero3 = memory.state_bytes(num_params, TRAINING.model_copy(update={"zero": 3}), layout)
    return [num_params * part for part in parts] + [zero3]


def measured(model: Model, ends: tuple[bool, bool], data: int, tensor: int) -> list[float]:
    """The same by the storages that torch makes."""
    mesh = stage_mesh("cpu", data=data, tensor=tensor)
    module = make_slice(model, ends)
    if tensor > 1:
        divide(module, mesh[TENSOR])
    shard(module, module.blocks, mesh[DATA], param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        return run_step(module, model, tensor)


def make_slice(model: Model, ends: tuple[bool, bool]) -> HuggingFaceSlice:
    """Eight layers without memory, beside none."""
    first = 0 if ends[0] else model.num_layers - NUM_LAYERS
    config = AutoConfig.for_model(**config_of(model, "float32"))
    return HuggingFaceSlice(build(config, torch.float32), StageSlice(first, first + NUM_LAYERS, *ends))


def run_step(module: HuggingFaceSlice, model: Model, tensor: int) -> list[float]:
    """One microbatch there and back, and the update."""
    boundary = Boundary((1, LENGTH // tensor, model.hidden), torch.bfloat16)
    stage, tokens = TorchStage(module, boundary), torch.zeros(1, 1, LENGTH, dtype=torch.int64)
    reduction, activation = StepReduction(module, stage.store), torch.empty(boundary.shape, dtype=boundary.dtype)
    reduction.begin()
    stage.begin_step(Batch(tokens, tokens, LENGTH))
    stage.forward(0, activation)
    weights = num_bytes(module.parameters())
    stage.input_grad(0, None if module.part.has_head else activation)
    stage.weight_grad(0)
    gradients = num_bytes(parameter.grad for parameter in module.parameters())
    reduction.end()
    return [weights, gradients, *num_state_bytes(module)]


def num_state_bytes(module: nn.Module) -> tuple[int, int]:
    """Bytes of masters and moments, and those with the gradients' shards."""
    own = [nn.Parameter(local_part(parameter.detach())) for parameter in module.parameters()]
    for mine, parameter in zip(own, module.parameters(), strict=True):
        mine.grad = local_part(parameter.grad)
    adamw = torch.optim.AdamW(own)
    adamw.step()
    moments = [tensor for state in adamw.state.values() for key, tensor in state.items() if key != "step"]
    state = num_bytes([*own, *moments])
    return state, state + num_bytes(mine.grad for mine in own)


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of all storages behind them."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    main()
