"""Long contexts: sequences of all lengths cut and packed into chunks, ordered, grouped, and what each recomputes."""

from typing import TYPE_CHECKING

from farpipe.core.lazy import lazy

if TYPE_CHECKING:
    from farpipe.planning.workload.batch_options import BatchOptions
    from farpipe.planning.workload.batch_plan import BatchPlan
    from farpipe.planning.workload.chunk import Chunk, Slice, followed
    from farpipe.planning.workload.group_steps import group_problem, plan_group_step
    from farpipe.planning.workload.layout import chunk_costs, shares
    from farpipe.planning.workload.length_summary import summarize
    from farpipe.planning.workload.lengths import has_documents, read_lengths, sample_lengths
    from farpipe.planning.workload.sequence_plan import SequencePlan, plan_sequences, plan_with_cut
    from farpipe.planning.workload.step_plans import Packing, StepPlan, options_of, step_plan

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

# Imported when they are asked for: plans of sequences of one length need none of them. No module here may have the name
# of what it hands out: once imported, it would hide that.
__getattr__ = lazy(
    __name__,
    {
        "BatchOptions": "batch_options:BatchOptions",
        "BatchPlan": "batch_plan:BatchPlan",
        "Chunk": "chunk:Chunk",
        "Slice": "chunk:Slice",
        "followed": "chunk:followed",
        "group_problem": "group_steps:group_problem",
        "plan_group_step": "group_steps:plan_group_step",
        "chunk_costs": "layout:chunk_costs",
        "shares": "layout:shares",
        "summarize": "length_summary:summarize",
        "has_documents": "lengths:has_documents",
        "read_lengths": "lengths:read_lengths",
        "sample_lengths": "lengths:sample_lengths",
        "SequencePlan": "sequence_plan:SequencePlan",
        "plan_sequences": "sequence_plan:plan_sequences",
        "plan_with_cut": "sequence_plan:plan_with_cut",
        "Packing": "step_plans:Packing",
        "StepPlan": "step_plans:StepPlan",
        "options_of": "step_plans:options_of",
        "step_plan": "step_plans:step_plan",
    },
)
