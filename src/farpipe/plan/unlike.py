"""Search for replicas and ranks that differ: the fastest of the spreads of `farpipe.plan.spreads`.

Those that an estimate puts first are simulated first, MAX_PLAYED of them at most; one is left out if a bound shows that
it can't be faster than what was found. From the bounds of the rest follows by how much one of them could be faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from farpipe.cost import JobCosts, Layout, memory
from farpipe.cost.links import ring_links
from farpipe.cost.transfer import narrowed_bytes, replica_link, ring_bytes
from farpipe.errors import InfeasibleError, InputError
from farpipe.plan.groups import PlayedGroups, balanced, play_groups, shaped_group
from farpipe.plan.orders import AUTO
from farpipe.plan.spreads import Degrees, GroupDegrees, Shortlist, Spread, spreads
from farpipe.plan.stage_modes import open_modes
from farpipe.spec import Job, Site

KEPT_DEGREES: Final = 4
"""Degrees of every kind of site, the fastest by their bound, that are combined with other kinds'."""
MAX_PLAYED: Final = 32
"""Spreads that are simulated at most."""


@dataclass(frozen=True)
class UnlikeFound:
    """The fastest spread that was simulated, and how sure it is that there is no faster one."""

    played: PlayedGroups
    num_spreads: int
    bound_s: float
    """No spread that was looked at is faster; `played.step_s` where that is the best of all."""

    @property
    def gap(self) -> float:
        """By how much another of the spreads could be faster at most, relative."""
        return self.gap_of(self.played.step_s)

    def gap_of(self, step_s: float) -> float:
        """The same of any step."""
        return max(0.0, step_s / self.bound_s - 1)


def find_unlike(job: Job, costs: JobCosts) -> UnlikeFound:
    """The fastest spread; InfeasibleError where none works."""
    bound = _Bound(job, costs)
    bounds = {spread: bound.seconds(spread) for spread in spreads(job, keep=bound)}
    left = sorted(bounds, key=bound.estimate_s, reverse=True)
    best: PlayedGroups | None = None
    obstacle: Exception = InfeasibleError("no groups of replicas fit the sites and the batch")
    num_played = 0
    while left and (best is None or num_played < MAX_PLAYED):
        spread = left.pop()
        if best is not None and bounds[spread] >= best.step_s:
            continue
        try:
            played = play_spread(job, costs, spread)
        except (InfeasibleError, InputError) as error:
            obstacle = error
            continue
        num_played += 1
        best = played if best is None or played.step_s < best.step_s else best
    if best is None:
        raise obstacle
    return UnlikeFound(best, len(bounds), min([best.step_s, *(bounds[spread] for spread in left)]))


def play_spread(job: Job, costs: JobCosts, spread: Spread) -> PlayedGroups:
    """The spread with layers and shares of the batch settled; errors as for `play_groups`."""
    size = spread.microbatch_size
    groups = [shaped_group(job, costs, one.sites, one.tensor, one.data, size) for one in spread.groups]
    return play_groups(job, costs, balanced(job, costs, groups, [None] * len(groups)), job.schedule or AUTO)


class _Bound(Shortlist):
    """Seconds that no division of layers, no order and no shares beat: all that is computed, evenly divided."""

    def __init__(self, job: Job, costs: JobCosts) -> None:
        self._job, self._costs = job, costs
        self._sites = {site.name: site for site in job.cluster.sites}
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    def of_site(self, site: Site, degrees: Sequence[Degrees], size: int) -> Sequence[Degrees]:
        """See Shortlist: the KEPT_DEGREES fastest of the site alone."""
        return sorted(degrees, key=lambda one: self._alone_s(site, one, size))[:KEPT_DEGREES]

    def _alone_s(self, site: Site, degrees: Degrees, size: int) -> float:
        ranks, tensor = degrees
        data = site.num_devices // (ranks * tensor)
        return self.seconds(Spread((GroupDegrees((site.name,) * ranks, (tensor,) * ranks, (data,) * ranks),), size))

    def seconds(self, spread: Spread) -> float:
        """A bound: computing the whole batch, with shares that let all groups end at once, or sending it on."""
        size = spread.microbatch_size
        speed = sum(max(one.data) * size / self.pace_s(one, size) for one in spread.groups)
        return self._job.training.global_batch / speed

    def estimate_s(self, spread: Spread) -> float:
        """The bound, and about what filling the pipelines and summing gradients add to it."""
        size = spread.microbatch_size
        fill_s = max((len(one.sites) - 1) * self.pace_s(one, size) for one in spread.groups)
        inside_s = max(map(self._inside_s, spread.groups))
        return self.seconds(spread) + fill_s + inside_s + self._across_s(spread)

    def _inside_s(self, group: GroupDegrees) -> float:
        """Sum over the replicas of the rank that takes longest, layers evenly divided."""
        seconds = []
        for name, tensor, data in zip(group.sites, group.tensor, group.data, strict=True):
            site, layout = self._sites[name], Layout(1, data, tensor, 1, 1, 1)
            link = replica_link(site, self._costs.calibration(site), layout)
            num_bytes = self._gradient_bytes / tensor / len(group.sites)
            seconds.append(link.seconds(ring_bytes("all-reduce", num_bytes, data)) if data > 1 else 0.0)
        return max(seconds)

    def _across_s(self, spread: Spread) -> float:
        """Sum over the groups, each layer between the sites that would have it were layers evenly divided."""
        if len(spread.groups) == 1:
            return 0.0
        first = [one.sites[0] for one in spread.groups]
        links = ring_links(self._job.cluster, list(dict.fromkeys(first)))
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        places = len(dict.fromkeys(spread.groups[0].sites))
        return ring_bytes("all-reduce", self._gradient_bytes, len(links)) / slowest / places

    @property
    def _gradient_bytes(self) -> float:
        return self._job.model.num_params * memory.gradient_bytes(self._job.training.precision)

    def pace_s(self, group: GroupDegrees, size: int) -> float:
        """The slowest rank's seconds for a microbatch, fractions of layers allowed."""
        sequences, last = max(group.data) * size, len(group.sites) - 1
        layers, speed = float(self._job.model.num_layers), 0.0
        for rank, (name, tensor, data) in enumerate(zip(group.sites, group.tensor, group.data, strict=True)):
            layer_s, extra_s = self._parts(name, tensor, data, sequences // data, rank == 0, rank == last)
            layers += extra_s / layer_s
            speed += 1 / layer_s
        return max(layers / speed, self._message_s(group, sequences))

    def _message_s(self, group: GroupDegrees, sequences: int) -> float:
        """Seconds that the slowest link between two of its sites is busy with a microbatch."""
        at = Layout(1, 1, 1, 1, sequences, 1)
        size = narrowed_bytes(memory.boundary_bytes(self._job.model, self._job.training, at), self._job.training)
        links = [self._job.cluster.link(a, b) for a, b in pairwise(group.sites) if a != b]
        return max((size / link.bandwidth_bytes_per_s for link in links if link is not None), default=0.0)

    def _parts(self, name: str, tensor: int, data: int, size: int, first: bool, last: bool) -> tuple[float, float]:
        """Seconds of a layer, and of what a stage has besides, in the mode that computes least."""
        site = self._sites[name]
        key = (site.device.name, site.devices_per_machine, tensor, data, size, first, last)
        if key not in self._known:
            layout = Layout(1, data, tensor, 1, size, 1)
            modes = open_modes(self._costs, [site])
            pairs = [self._costs.apart(layout, site, mode, embedding=first, head=last) for mode in modes]
            layer_s = min(one.seconds - none.seconds for none, one in pairs)
            self._known[key] = layer_s, min(none.seconds for none, _ in pairs)
        return self._known[key]
