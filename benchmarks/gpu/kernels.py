"""Two things that farpipe leaves to a GPU: rounding of messages, and weight gradients added with more digits."""

import time
from collections.abc import Callable
from typing import Any, Final

ROUNDED_BYTES: Final = {"cuda": 64 << 20, "cpu": 1 << 20}
NUM_REPEATS: Final = 20


def rounded_bytes(device: str) -> int:
    """Bytes of the message that a check rounds: on a CPU a short one, which takes as long."""
    return ROUNDED_BYTES[device]


def rounding_ms(device: str, num_bytes: int) -> float:
    """Milliseconds for a message in bf16 to int8 and back."""
    import torch

    from farpipe.engine.executor.wire_types import narrow, narrowed_form, widen

    x = torch.randn(1, num_bytes // 4096, 2048, device=device).bfloat16()
    form = narrowed_form(narrow(x, "int8").cpu())
    return least_ms(lambda: widen(narrow(x, "int8"), form), device)


def added_product(device: str, width: int = 4096) -> tuple[float, float]:
    """(time as a multiple of the product's alone, largest error beside float64) of a W in bf16 to float32."""
    import torch

    from farpipe.engine.stages.weight_grads import add_product

    left, right = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    weight = torch.nn.Parameter(torch.zeros(width, width, device=device, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(width, width, device=device)
    add_product(weight, left, right)
    exact = left[:64].double() @ right.double()
    error = float((weight.grad[:64].double() - exact).abs().max() / exact.abs().max())
    plain = least_ms(lambda: left @ right, device)
    return least_ms(lambda: add_product(weight, left, right), device) / plain, error


def least_ms(work: Callable[[], Any], device: str) -> float:
    """The least time of several."""
    import torch

    found = []
    for _ in range(NUM_REPEATS):
        begin_s = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin_s)
    return 1e3 * min(found)
