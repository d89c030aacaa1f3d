"""One line of a log for a step of a training, with the names that torchtitan's has. Needs no torch."""

from collections.abc import Mapping
from typing import Any, Final

from farpipe.units import format_bytes

LOG_EVERY_STEPS: Final = 10


def is_logged(step: int, num_steps: int, every: int = LOG_EVERY_STEPS) -> bool:
    """True if a line is due after `step`: after the first and the last one, and every `every` steps; 0: never."""
    return every > 0 and (step == 0 or (step + 1) % every == 0 or step + 1 == num_steps)


def log_line(line: Mapping[str, Any], num_steps: int) -> str:
    """A line of ``metrics.jsonl`` as words: loss, gradient norm, memory, tokens/s, MFU; unknown ones are left out."""
    parts = [f"step: {line['step'] + 1}/{num_steps}"]
    if line.get("loss") is not None:
        parts.append(f"loss: {line['loss']:.4f}")
    if line.get("grad_norm") is not None:
        parts.append(f"grad_norm: {line['grad_norm']:.4f}")
    if line.get("evaluation_loss") is not None:
        parts.append(f"evaluation_loss: {line['evaluation_loss']:.4f}")
    memory = line.get("cuda_peak_max_bytes") or line.get("rss_max_bytes")
    if memory:
        parts.append(f"memory: {format_bytes(memory)}")
    parts.append(f"step_s: {line['step_s']:.3f}")
    if line.get("tokens_per_s"):
        parts.append(f"tps: {line['tokens_per_s']:,.0f}")
    if line.get("model_flops_utilisation") is not None:
        parts.append(f"mfu: {100 * line['model_flops_utilisation']:.2f}%")
    return "  ".join(parts)
