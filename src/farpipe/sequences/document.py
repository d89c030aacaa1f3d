"""A batch's plan as JSON data."""

from typing import Any

from farpipe.sequences.planner import SequencePlan


def plan_data(plan: SequencePlan) -> dict[str, Any]:
    """Document that ``farpipe sequences plan --json`` prints.

    `pipelines`: numbers of the chunks in the order of their forwards; microbatch j of `problems` and `schedules` [i] is
    the j-th of pipeline i. `recomputed_layers` [pipeline][stage][chunk of the pipeline].
    """
    return {
        "chunks": [chunk.to_data() for chunk in plan.chunks],
        "pipelines": [list(pipeline.chunks) for pipeline in plan.pipelines],
        "problems": [pipeline.problem.to_data() for pipeline in plan.pipelines],
        "schedules": [pipeline.schedule.to_data() for pipeline in plan.pipelines],
        "recomputed_layers": [pipeline.recomputed.tolist() for pipeline in plan.pipelines],
        "makespan_s": [pipeline.makespan_s for pipeline in plan.pipelines],
        "overhead_s": plan.overhead_s,
        "step_s": plan.step_s,
        "tokens_per_s": plan.num_tokens / plan.step_s,
        "num_slices": plan.num_slices,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "planning_s": plan.planning_s,
    }
