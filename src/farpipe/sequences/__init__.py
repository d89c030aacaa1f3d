"""Long contexts: sequences of all lengths cut and packed into chunks, ordered, grouped, and what each recomputes."""

from farpipe.sequences.chunk import Chunk, Slice, check_chunks, followed
from farpipe.sequences.layout import chunk_costs
from farpipe.sequences.lengths import read_lengths, sample_lengths
from farpipe.sequences.planner import BatchOptions, SequencePlan, plan_sequences, plan_with_cut
from farpipe.sequences.replicas import shares
from farpipe.sequences.step_plan import Packing, StepPlan, options_of, step_plan
from farpipe.sequences.summary import gain_of_chunks, summarize

__all__ = [
    "BatchOptions",
    "Chunk",
    "Packing",
    "SequencePlan",
    "Slice",
    "StepPlan",
    "check_chunks",
    "chunk_costs",
    "followed",
    "gain_of_chunks",
    "options_of",
    "plan_sequences",
    "plan_with_cut",
    "read_lengths",
    "sample_lengths",
    "shares",
    "step_plan",
    "summarize",
]
