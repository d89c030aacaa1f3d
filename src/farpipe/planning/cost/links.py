"""The links of a step's Problem: who sends to whom over what, each with the name that everyone knows it by."""

import math
from collections import Counter
from collections.abc import Sequence

from farpipe.core.errors import InfeasibleError
from farpipe.core.spec import Cluster, Site, SiteLink
from farpipe.core.step import Link, Transfer
from farpipe.planning.cost.calibration import Calibration
from farpipe.planning.cost.layout import Layout, Placement
from farpipe.planning.cost.lossy_links import lossy_link, mean_lateness_s
from farpipe.planning.cost.tcp_windows import ColdLink, cold_link
from farpipe.planning.cost.transfer import EffectiveLink, rank_link


def ring_links(cluster: Cluster, sites: Sequence[str]) -> list[SiteLink]:
    """The links from every site to the next and from the last to the first, for two sites there and back.

    InfeasibleError when there is none.
    """
    found = []
    for source, target in zip(sites, [*sites[1:], sites[0]], strict=True):
        link = cluster.link(source, target)
        if link is None:
            raise InfeasibleError(
                f"replicas at {source!r} and {target!r} must talk, and there is no link from {source!r} to {target!r}; "
                "add it to cluster.links"
            )
        found.append(link)
    return found


class StepLinks:
    """Makes the transfers of a step and keeps the links that they use.

    Between sites a link is ``a>b``, shared by all ranks and replicas: messages of the replicas cross together, so the
    bytes of one transfer are those of all. Inside a site each pair of ranks has its own, ``site:rank>site:rank``, a
    rank's data-parallel ring is ``site:rank>site:rank`` with the same rank twice; bytes are those of one replica. Of a
    ring over sites a transfer names the slowest link; the others are in `links` too.
    """

    def __init__(self, cluster: Cluster, layout: Layout, sites: dict[int, Site], pace_s: float = math.inf) -> None:
        """`sites`: the site of every rank; `pace_s`: how long the slowest rank takes for a microbatch."""
        self.cluster, self.layout, self.sites, self._pace_s = cluster, layout, sites, pace_s
        self.links: dict[str, Link] = {}
        self._places: dict[int, int] = {}
        """The number of ranks before each rank on its site."""
        count: Counter[str] = Counter()
        for rank in sorted(sites):
            self._places[rank] = count[sites[rank].name]
            count[sites[rank].name] += 1

    def between(
        self, source: Placement, target: Placement, num_bytes: float, calibration: Calibration, count: int = 1
    ) -> Transfer:
        """One replica's `num_bytes` from the rank of `source` to that of `target`, `count` times a step.

        InfeasibleError when the two sites have no link in that direction.
        """
        if source.site == target.site:
            site = self.sites[source.rank]
            places = self._places[source.rank], self._places[target.rank]
            effective = rank_link(site, calibration, self.layout, *places)
            return self._over(f"{site.name}:{source.rank}>{site.name}:{target.rank}", effective, num_bytes)
        link = self.cluster.link(source.site, target.site)
        if link is None:
            raise InfeasibleError(
                f"ranks {source.rank} and {target.rank} must talk, and there is no link from {source.site!r} to "
                f"{target.site!r}; add it to cluster.links or choose another order of sites"
            )
        return self._between_sites(link, num_bytes * self.layout.data, self._pace_s, count)

    def ring(self, rank: int, effective: EffectiveLink, num_bytes: float) -> Transfer:
        """Link over which every device of `rank` sends in a collective of the replicas."""
        site = self.sites[rank].name
        return self._over(f"{site}:{rank}>{site}:{rank}", effective, num_bytes)

    def ring_over_sites(self, num_bytes: float) -> Transfer:
        """Link from every site of `Layout.replica_sites` to the next one in a collective.

        InfeasibleError when two neighbours have no link.
        """
        links = ring_links(self.cluster, self.layout.replica_sites)
        transfers = {link.name: self._between_sites(link, num_bytes, math.inf) for link in links}
        return transfers[min(links, key=lambda link: link.bandwidth_bytes_per_s).name]

    def seconds(self, transfer: Transfer) -> float:
        """Time of a transfer on its empty link."""
        assert isinstance(transfer.link, str)
        assert isinstance(transfer.bytes, float)
        there_s = transfer.arrives_after_s
        return there_s if isinstance(there_s, float) else self.links[transfer.link].travel_s(transfer.bytes)

    def occupied_s(self, transfer: Transfer) -> float:
        """Time for which a transfer keeps its link from others."""
        assert isinstance(transfer.link, str)
        assert isinstance(transfer.bytes, float)
        occupies_s = transfer.occupies_s
        return occupies_s if isinstance(occupies_s, float) else self.links[transfer.link].occupied_s(transfer.bytes)

    def _between_sites(self, link: SiteLink, num_bytes: float, gap_s: float, count: int = 1) -> Transfer:
        """Over a link that loses packets or jitters a message is there when it is in the mean."""
        transfer = self._over(link.name, EffectiveLink(link.latency_s, link.bandwidth_bytes_per_s), num_bytes)
        if (cold := cold_link(self.cluster, link, self.layout.data)) is not None:
            return _over_cold(transfer, cold, link.latency_s, gap_s, count)
        lossy = lossy_link(self.cluster, link)
        if not lossy.is_disturbed:
            return transfer
        occupies_s = num_bytes / lossy.goodput_bytes_per_s
        there_s = occupies_s + link.latency_s + mean_lateness_s(lossy, num_bytes, gap_s)
        return transfer.model_copy(update={"occupies_s": occupies_s, "arrives_after_s": there_s})

    def _over(self, name: str, effective: EffectiveLink, num_bytes: float) -> Transfer:
        if name not in self.links:
            rate = effective.bandwidth_bytes_per_s
            self.links[name] = Link.computed(latency_s=effective.latency_s, bandwidth_bytes_per_s=rate)
        return Transfer.computed(link=name, bytes=float(num_bytes))


def _over_cold(transfer: Transfer, cold: ColdLink, latency_s: float, gap_s: float, count: int) -> Transfer:
    """`count` messages, one every `gap_s`. Each direction rests for about half of a step (GPipe), or while others fill
    and drain: the first message finds windows closed."""
    assert isinstance(transfer.bytes, float)
    num_bytes = transfer.bytes
    sent_s = cold.messages_s(num_bytes, count, gap_s, count * gap_s / 2)
    occupies_s = tuple(cold.occupied_s(num_bytes, seconds) for seconds in sent_s)
    there_s = tuple(seconds + latency_s for seconds in sent_s)
    times = (occupies_s, there_s) if count > 1 else (occupies_s[0], there_s[0])
    return transfer.model_copy(update=dict(zip(("occupies_s", "arrives_after_s"), times, strict=True)))
