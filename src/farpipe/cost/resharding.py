"""Messages between ranks that have different tensor or data degrees: who sends what, over which links, and what then.

A microbatch of B sequences leaves rank a, whose d_a replicas of t_a devices hold B/d_a sequences each, for rank b with
d_b and t_b. Whatever the degrees, B x sequence length x hidden numbers cross once, no piece twice: the scatter/gather
optimisation of Megatron-LM (Narayanan et al., SC 2021, section 4.1) and the resharding of Alpa (Zhuang et al., MLSys
2023, arXiv 2211.05322). With sequence parallelism every device of a has the slice that it sends and every device of b
gets the slice that it works on; the side with fewer devices cuts or joins pieces. Without it every device of b needs
its replica's whole tensor, of which each receives 1/t_b: an all-gather over the t_b devices follows, (t_b - 1)/t_b of
the tensor over the links of the machine. Between equal degrees Megatron-LM does the same; its cost is part of what the
calibration was fitted to, so it is counted for unequal tensor degrees alone.

Inside a site min(d_a t_a, d_b t_b) pairs of devices send side by side; between sites all share the link.
"""

from farpipe.cost import memory
from farpipe.cost.calibration import Calibration
from farpipe.cost.layout import Layout
from farpipe.cost.stage import JobCosts
from farpipe.cost.transfer import (
    EffectiveLink,
    effective_machine_link,
    effective_site_link,
    ring_bytes,
    ring_link,
)
from farpipe.spec import Site


def shaped_rank_link(
    site: Site, calibration: Calibration, layout: Layout, source: int, target: int, first: tuple[int, int]
) -> EffectiveLink:
    """Between two ranks of one site whose shapes differ, for the bytes of one of `layout.data` replicas.

    `first`: the place of the first device of each at the site.
    """
    sizes = [layout.of_rank(rank).devices_per_rank for rank in (source, target)]
    ends = [begin + size - 1 for begin, size in zip(first, sizes, strict=True)]
    same_machine = min(first) // site.devices_per_machine == max(ends) // site.devices_per_machine
    one = (effective_machine_link if same_machine else effective_site_link)(site, calibration)
    return EffectiveLink(one.latency_s, one.bandwidth_bytes_per_s * min(sizes) / layout.data)


def gather_s(costs: JobCosts, layout: Layout, source: int, target: int, site: Site) -> float:
    """Seconds of the all-gather at `target`, a rank on `site`, after it has its pieces; 0 between equal degrees."""
    here, there = layout.of_rank(source), layout.of_rank(target)
    training = costs.settled(layout)
    if here.tensor == there.tensor or there.tensor == 1 or training.sequence_parallel is True:
        return 0.0
    calibration = costs.calibration(site)
    whole = memory.boundary_bytes(costs.model, training, there) / there.context
    effective = ring_link(site, calibration, there.tensor)
    return calibration.collective_start_s + effective.seconds(ring_bytes("all-gather", whole, there.tensor))
