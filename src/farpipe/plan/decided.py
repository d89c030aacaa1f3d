"""What the planner settles before it searches, where the user left it open: ZeRO's stage and sequence parallelism."""

from typing import Final

from farpipe.spec import Job

ZERO_STAGES: Final = (1, 3)
"""Tried in turn where the job leaves it open, the next one only if memory is too small for all before it."""


def decided(job: Job, zero: int = 1) -> Job:
    """The job with this stage of ZeRO and with sequence parallelism where the user leaves them open.

    Under this cost model ZeRO-1 and sequence parallelism only save: ZeRO-1 sends what an all-reduce sends, the other
    moves what tensor parallelism moves (Rajbhandari et al., arXiv 1910.02054; Korthikanti et al., arXiv 2205.05198).
    Where there are no replicas, or no tensor parallelism, they change nothing.
    """
    wanted = {"zero": zero, "sequence_parallel": True}
    chosen = {key: value for key, value in wanted.items() if getattr(job.training, key) == "auto"}
    return job.model_copy(update={"training": job.training.model_copy(update=chosen)}) if chosen else job
