"""torchtitan's Trainer of its Llama debug model on a CPU: leaves its settings (config.json) and traces of the profiler
in a folder, and its log on stdout. Needs torchtitan 0.3 and triton, and no farpipe.

    python -m benchmarks.shared.torchtitan_on_cpu FOLDER [--steps 40] > log.txt

6 layers of width 256, batches of 2 x 512 tokens, fp32, on one core. Four of every ten steps are traced. What torchtitan
lacks on a CPU is lent by `benchmarks.engine.titan`.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from benchmarks.engine.titan import help_cpu, help_torchtitan, write_tokenizer


def configuration(folder: Path, num_steps: int) -> Any:
    """torchtitan's debug model with attention, loss and text that a CPU has."""
    import torchtitan.models.common.attention as attention
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    training, profiler = config.training, config.profiler
    training.local_batch_size, training.seq_len, training.steps = 2, 512, num_steps
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.validator.enable = config.checkpoint.enable = False
    profiler.enable_profiling, profiler.profile_freq = True, 10
    profiler.profiler_warmup, profiler.profiler_active = 1, 4
    config.dump_folder, config.debug.save_config_file = str(folder), "config.json"
    config.hf_assets_path = write_tokenizer(folder / "tokenizer")
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29500")
    help_cpu()
    import torch

    torch.set_num_threads(1)
    help_torchtitan()
    from torchtitan.tools.logging import init_logger

    init_logger()
    configuration(asked.folder, asked.steps).build().train()


if __name__ == "__main__":
    main()
