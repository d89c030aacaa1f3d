"""Long contexts: sequences of all lengths cut and packed into chunks, ordered, grouped, and what each recomputes."""

from farpipe.sequences.batch_options import BatchOptions
from farpipe.sequences.batch_plan import BatchPlan
from farpipe.sequences.batch_planner import plan_batch
from farpipe.sequences.chunk import Chunk, Slice, followed
from farpipe.sequences.group_steps import group_problem, plan_group_step
from farpipe.sequences.layout import chunk_costs, shares
from farpipe.sequences.length_summary import gain_of_chunks, summarize
from farpipe.sequences.lengths import has_documents, read_lengths, sample_lengths
from farpipe.sequences.planner import SequencePlan, plan_sequences, plan_with_cut
from farpipe.sequences.step_plan import Packing, StepPlan, options_of, step_plan

__all__ = [
    "BatchOptions",
    "BatchPlan",
    "Chunk",
    "Packing",
    "SequencePlan",
    "Slice",
    "StepPlan",
    "chunk_costs",
    "followed",
    "gain_of_chunks",
    "group_problem",
    "has_documents",
    "options_of",
    "plan_batch",
    "plan_group_step",
    "plan_sequences",
    "plan_with_cut",
    "read_lengths",
    "sample_lengths",
    "shares",
    "step_plan",
    "summarize",
]
