"""Long contexts: sequences of all lengths cut and packed into chunks, ordered, grouped, and what each recomputes."""

from farpipe.sequences.chunk import Chunk, Slice, check_chunks, followed
from farpipe.sequences.layout import chunk_costs
from farpipe.sequences.lengths import read_lengths, sample_lengths
from farpipe.sequences.planner import SequencePlan, Wish, plan_as_before, plan_sequences
from farpipe.sequences.replicas import shares
from farpipe.sequences.step_plan import Packing, StepPlan, step_plan, wish_of
from farpipe.sequences.summary import gain_of_chunks, summarize

__all__ = [
    "Chunk",
    "Packing",
    "SequencePlan",
    "Slice",
    "StepPlan",
    "Wish",
    "check_chunks",
    "chunk_costs",
    "followed",
    "gain_of_chunks",
    "plan_as_before",
    "plan_sequences",
    "read_lengths",
    "sample_lengths",
    "shares",
    "step_plan",
    "summarize",
    "wish_of",
]
