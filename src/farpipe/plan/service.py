"""Planner: plans and quotes for many requests on many clusters, with one cache of stage costs."""

from collections.abc import Mapping, Sequence

from farpipe.cost import Profile
from farpipe.errors import InfeasibleError
from farpipe.plan.plan import Plan
from farpipe.plan.planner import make_plan
from farpipe.plan.quote import Quote, quote_of
from farpipe.spec import Cluster, Request


class Planner:
    """Answers "this request on this cluster, or on what is left of it"."""

    def __init__(self, profiles: Sequence[Profile] = ()) -> None:
        self._profiles = tuple(profiles)

    def plan(self, request: Request, cluster: Cluster) -> Plan:
        """The best plan; errors as for `make_plan`."""
        return make_plan(request.on(cluster), self._profiles)

    def quote(
        self,
        request: Request,
        cluster: Cluster,
        *,
        devices: Mapping[str, int] | None = None,
        bytes_per_s: Mapping[str, float] | None = None,
    ) -> Quote:
        """What `request` would take at its best on `cluster`, or on the part of it that `left_of` describes.

        InfeasibleError when it does not fit there.
        """
        left = left_of(cluster, devices or {}, bytes_per_s or {})
        known = [profile for profile in self._profiles if any(s.device.name == profile.device for s in left.sites)]
        return quote_of(make_plan(request.on(left), known))


def left_of(cluster: Cluster, devices: Mapping[str, int], bytes_per_s: Mapping[str, float]) -> Cluster:
    """`cluster` with `devices` at its sites (by name; 0 leaves a site out) and `bytes_per_s` on its links (``a>b``).

    What is not named stays as it is; a link with a rate of 0 is left out. InfeasibleError when no device is left.
    """
    sites = [s.model_copy(update={"num_devices": devices.get(s.name, s.num_devices)}) for s in cluster.sites]
    names = {site.name for site in sites if site.num_devices}
    rated = [
        link.model_copy(update={"bandwidth_bytes_per_s": bytes_per_s.get(link.name, link.bandwidth_bytes_per_s)})
        for link in cluster.links
        if {link.source, link.target} <= names
    ]
    if not names:
        raise InfeasibleError("no device is left at any site")
    links = tuple(link for link in rated if link.bandwidth_bytes_per_s > 0)
    return Cluster.model_construct(sites=tuple(s for s in sites if s.num_devices), links=links)
