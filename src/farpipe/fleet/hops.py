"""Quotes of the planner for jobs over several sites, on just those devices and links."""

from collections.abc import Mapping

from farpipe.errors import InfeasibleError
from farpipe.fleet.job import Kind, Placement
from farpipe.plan.service import Planner
from farpipe.spec import Cluster, Request, Training, preset_model

Devices = tuple[tuple[str, int], ...]
"""(site, number of devices) in pipeline order."""


def request_of(kind: Kind) -> Request:
    """The request to the planner for a kind of job."""
    training = Training(sequence_length=kind.sequence_length, global_batch=kind.global_batch)
    return Request(model=preset_model(kind.model), training=training)


class PlannedHops:
    """Quotes of `Planner.quote` over several sites: layout, microbatches and the sites' order are the planner's choice.

    One takes about 20 ms, the closed form of `PlannerQuotes` none. Where the planner would rather leave a site out,
    the job runs as if it did and holds all its devices still.
    """

    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._cluster, self._planner = cluster, planner
        self._requests: dict[Kind, Request] = {}
        self._clusters: dict[frozenset[str], Cluster] = {}

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> Placement | None:
        """The job on `devices`, which may use no links but those of `rates` (bytes/s); None if it can't run there."""
        cluster = self._joined(frozenset(site for site, _ in devices))
        others = dict.fromkeys((link.name for link in cluster.links), 0.0)
        request = self._requests.setdefault(kind, request_of(kind))  # the planner keeps what it knows by identity
        try:
            quote = self._planner.quote(request, cluster, devices=dict(devices), bytes_per_s={**others, **rates})
        except InfeasibleError:
            return None
        power_w = {site: number * (cluster.site(site).device.power_w or 0.0) for site, number in devices}
        sent = {link: quote.link_bytes_per_s.get(link, 0.0) for link in rates}
        return Placement(devices, quote.step_s, sent, power_w)

    def _joined(self, names: frozenset[str]) -> Cluster:
        """The cluster of these sites and what links them."""
        if names not in self._clusters:
            self._clusters[names] = self._cluster.within(names)
        return self._clusters[names]
