"""Quotes of the planner for jobs over several sites, on just those devices and links."""

from collections.abc import Mapping
from itertools import permutations

from farpipe.errors import InfeasibleError
from farpipe.fleet.job import Kind, Placement
from farpipe.fleet.models import model_of
from farpipe.plan.quote import Quote
from farpipe.plan.service import Planner
from farpipe.spec import Cluster, Prices, Request, Training

Devices = tuple[tuple[str, int], ...]
"""(site, number of devices) in pipeline order."""


def request_of(kind: Kind) -> Request:
    """The request to the planner for a kind of job."""
    training = Training(sequence_length=kind.sequence_length, global_batch=kind.global_batch)
    return Request(model=model_of(kind.model), training=training)


class PlannedHops:
    """Quotes of `Planner.quote` over several sites: layout, microbatches and the sites' order are the planner's choice.

    One takes some 10 ms. Sites that are alike but for their names and prices share them. Where the planner would rather
    leave a site out, the job runs as if it did and holds all its devices still.
    """

    def __init__(self, cluster: Cluster, planner: Planner) -> None:
        self._cluster, self._planner = cluster, planner
        self._place = {site.name: index for index, site in enumerate(cluster.sites)}
        self._requests: dict[Kind, Request] = {}
        self._numbered: dict[tuple[str, ...], Cluster] = {}
        self._alike: dict[str, Cluster] = {}
        self._quotes: dict[tuple[object, ...], Quote | None] = {}

    def placement(self, kind: Kind, devices: Devices, rates: Mapping[str, float]) -> Placement | None:
        """The job on `devices`, which may use no links but those of `rates` (bytes/s); None if it can't run there."""
        counts = dict(sorted(devices, key=lambda part: self._place[part[0]]))
        number = {site: str(index) for index, site in enumerate(counts)}
        links = {name: ">".join(number[site] for site in name.split(">")) for name in rates}
        free = {links[name]: rate for name, rate in rates.items()}
        cluster = self._numbered_cluster(tuple(counts))
        quote = self._quote(kind, cluster, tuple(counts.values()), free)
        if quote is None:
            return None
        power_w = {site: count * (self._cluster.site(site).device.power_w or 0.0) for site, count in devices}
        sent = {name: quote.link_bytes_per_s.get(links[name], 0.0) for name in rates}
        return Placement(devices, quote.step_s, sent, power_w)

    def _quote(self, kind: Kind, cluster: Cluster, counts: tuple[int, ...], free: Mapping[str, float]) -> Quote | None:
        key = kind, id(cluster), counts, tuple(sorted(free.items()))
        if key not in self._quotes:
            request = self._requests.setdefault(kind, request_of(kind))  # the planner keeps what it knows by identity
            devices = {str(index): count for index, count in enumerate(counts)}
            rates = {link.name: free.get(link.name, 0.0) for link in cluster.links}
            try:
                self._quotes[key] = self._planner.quote(request, cluster, devices=devices, bytes_per_s=rates)
            except InfeasibleError:
                self._quotes[key] = None
        return self._quotes[key]

    def _numbered_cluster(self, names: tuple[str, ...]) -> Cluster:
        """The cluster of these sites, called 0, 1, ... and without prices; one object for all that are alike."""
        if names not in self._numbered:
            number = {name: str(index) for index, name in enumerate(names)}
            sites = tuple(
                self._cluster.site(name).model_copy(update={"name": number[name], "prices": Prices()}) for name in names
            )
            links = tuple(
                link.model_copy(update={"source": number[a], "target": number[b], "egress_usd_per_gb": None})
                for a, b in permutations(names, 2)
                if (link := self._cluster.link(a, b)) is not None
            )
            whole = self._cluster.model_copy(update={"sites": sites, "links": links})
            self._numbered[names] = self._alike.setdefault(whole.model_dump_json(), whole)
        return self._numbered[names]
