"""Choices made before the search: ZeRO's stage, sequence parallelism, and which of very many sites."""

from collections.abc import Sequence
from typing import Final

from farpipe.cost import Profile
from farpipe.cost.chunk_profile import ChunkProfile
from farpipe.errors import InputError
from farpipe.spec import Job
from farpipe.spec.training import Zero
from farpipe.strict import nearest

MAX_PLANNED_SITES: Final = 16
"""Largest number of sites that a search looks at, unless the job pins them."""
ZERO_STAGES: Final[tuple[Zero, ...]] = (1, 3)
"""Stages of ZeRO that are tried where the job leaves it open; the next one only if no layout fits with those before."""


def decided(job: Job, zero: Zero = 1) -> Job:
    """The job with this stage of ZeRO and with sequence parallelism where the user leaves them open.

    Under this cost model ZeRO-1 and sequence parallelism only save: ZeRO-1 sends what an all-reduce sends, the other
    moves what tensor parallelism moves (Rajbhandari et al., arXiv 1910.02054; Korthikanti et al., arXiv 2205.05198).
    Where there are no replicas, or no tensor parallelism, they change nothing.
    """
    training = job.training.decided(zero)
    return job if training is job.training else job.model_copy(update={"training": training})


def largest_sites(job: Job) -> Job:
    """The job with the MAX_PLANNED_SITES sites that compute most; unchanged where sites are fewer, or pinned.

    Sets of sites grow exponentially with their number, and a pipeline is over MAX_SITES at most.
    """
    sites = job.cluster.sites
    if len(sites) <= MAX_PLANNED_SITES or job.layout.sites is not None:
        return job
    power = [site.num_devices * max(site.device.peak_flops.values()) for site in sites]
    kept = sorted(range(len(sites)), key=lambda index: -power[index])[:MAX_PLANNED_SITES]
    return job.model_copy(update={"cluster": job.cluster.within([sites[index].name for index in kept])})


def left_out_note(num_sites: int) -> str:
    """Sentence on the sites that are not looked at and how to have others looked at; empty where all are."""
    if num_sites <= MAX_PLANNED_SITES:
        return ""
    return (
        f"Of {num_sites:,} sites the {MAX_PLANNED_SITES} that compute most were looked at; layout.sites pins others. A "
        "plan with others may be better."
    )


def expect_devices(job: Job, profiles: Sequence[Profile | ChunkProfile]) -> None:
    """InputError for a profile of a device that no site has."""
    names = {site.device.name for site in job.cluster.sites}
    for profile in profiles:
        if profile.device not in names:
            raise InputError(
                f"profile of {profile.device!r}: no site of the job has this device{nearest(profile.device, names)}; "
                f"devices: {', '.join(sorted(names))}"
            )
