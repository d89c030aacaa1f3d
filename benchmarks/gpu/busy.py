"""How much of the time of forwards and backwards the GPU is busy, by torch.profiler."""

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.shared.python_calls import python_calls

TOKENS: Final = 1024
NUM_MICROBATCHES: Final = 4


def busy(figures: dict[str, int], device: str = "cuda") -> tuple[float, float, float]:
    """(share of the span, longest gap in us, Python calls a layer and microbatch) of one stage's F and B in bf16."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    stage = whole_stage(figures, device)

    def step() -> None:
        for microbatch in range(NUM_MICROBATCHES):
            stage.forward(microbatch, None, in_parts=False)
            stage.backward(microbatch, None)
        stage.finish()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as found:
        step()
    on_gpu = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    share, gap_us = covered([(event.time_range.start, event.time_range.end) for event in on_gpu])
    return share, gap_us, python_calls(step) / NUM_MICROBATCHES / figures["num_layers"]


def whole_stage(figures: dict[str, int], device: str) -> Any:
    """The whole model as one stage, with a step's tokens."""
    import torch

    from farpipe.core.spec import Model, Training
    from farpipe.engine.data.batches import Batch
    from farpipe.engine.stages.make_stage import make_stage, numerics_of
    from farpipe.engine.stages.slices import StageSlice

    model = Model(name="checked", **figures)
    training = Training(sequence_length=TOKENS, global_batch=NUM_MICROBATCHES, microbatch_size=1)
    part = StageSlice(0, model.num_layers, True, True)
    stage = make_stage(model, training, part, numerics_of(training), device)
    tokens = torch.randint(model.vocab_size, (NUM_MICROBATCHES, 1, TOKENS))
    stage.begin_step(Batch(tokens, tokens.roll(-1, -1)))
    return stage


def covered(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(share, longest gap) of the time from the first start to the last end of `spans`; (0, infinite) without any."""
    if not spans:
        return 0.0, float("inf")
    ordered = sorted(spans)
    first, reached = ordered[0]
    idle, longest = 0.0, 0.0
    for start, end in ordered[1:]:
        gap = max(0.0, start - reached)
        idle, longest, reached = idle + gap, max(longest, gap), max(reached, end)
    return 1 - idle / (reached - first), longest
