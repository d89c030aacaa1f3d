"""torchtitan 0.2's trainer on a CPU: `torch.cpu` gets the functions that the trainer asks of a GPU.

    pip install torchtitan==0.2.2
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500 \
        python benchmarks/shared/torchtitan_on_cpu.py --job.config_file debug.toml

bf16 takes twenty times as long as ``mixed_precision_param = "float32"`` on a processor without instructions for it.
"""

import types
from typing import Any

import torch
import torch._utils
import torch.profiler


def lend_what_a_gpu_has() -> None:
    """Give torch.cpu the functions of a device's module, and the profiler no activity that is None."""
    lent: dict[str, Any] = {
        "get_device_name": "cpu",
        "get_device_properties": types.SimpleNamespace(total_memory=1 << 34),
        "current_device": 0,
        "memory_stats": {},
    } | dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache"))
    for name, value in lent.items():
        setattr(torch.cpu, name, lambda *_, value=value: value)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: torch.cpu
    profile = torch.profiler.profile
    torch.profiler.profile = lambda activities, **how: profile(activities=[*filter(None, activities)], **how)


if __name__ == "__main__":
    lend_what_a_gpu_has()
    import torchtitan.distributed.utils
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer, main

    torchtitan.distributed.utils.set_pg_timeouts = lambda *_, **__: None
    init_logger()
    main(Trainer)
