"""The exchange of parameters' differences between sites with local steps, in closed form."""

from collections.abc import Sequence

from farpipe.core.spec import LocalSteps, SiteLink
from farpipe.core.step import occupied_s


def exposed_exchange_s(local: LocalSteps, num_params: float, links: Sequence[SiteLink], compute_s: float) -> float:
    """Seconds of exchange in one step that nothing hides, on average; a step computes for `compute_s`.

    A fragment is merged when `delay_steps` steps are done and it has come, and a link carries one fragment at a time.
    `links`: from each site to every other.
    """
    whole_bytes = num_params * local.bytes_per_param
    once_s = max(occupied_s(link, whole_bytes / local.fragments) + link.latency_s for link in links)
    exposed_s = max(0.0, once_s - local.delay_steps * compute_s) * local.fragments / local.every
    return max(exposed_s, max(occupied_s(link, whole_bytes) for link in links) / local.every - compute_s)
