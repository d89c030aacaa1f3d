"""Long contexts: sequences of all lengths cut and packed into chunks, ordered, grouped, and what each recomputes."""

from farpipe.planning.workload.batch_options import BatchOptions
from farpipe.planning.workload.batch_plan import BatchPlan
from farpipe.planning.workload.chunk import Chunk, Slice, followed
from farpipe.planning.workload.group_steps import group_problem, plan_group_step
from farpipe.planning.workload.layout import chunk_costs, shares
from farpipe.planning.workload.length_summary import summarize
from farpipe.planning.workload.lengths import has_documents, read_lengths, sample_lengths
from farpipe.planning.workload.sequence_plan import SequencePlan, plan_sequences, plan_with_cut
from farpipe.planning.workload.step_plan import Packing, StepPlan, options_of, step_plan

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
    "group_problem",
    "has_documents",
    "options_of",
    "plan_group_step",
    "plan_sequences",
    "plan_with_cut",
    "read_lengths",
    "sample_lengths",
    "shares",
    "step_plan",
    "summarize",
]
