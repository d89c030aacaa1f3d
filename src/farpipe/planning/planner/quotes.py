"""Quotes for many requests on many clusters, with one cache of stage costs."""

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Final

from farpipe.core.arguments import expect_kind
from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.spec import Cluster, Job, Request
from farpipe.planning.cost import JobCosts, Profile
from farpipe.planning.planner.candidates import Candidate, decided, placed
from farpipe.planning.planner.evaluate import Evaluated, evaluate, whole
from farpipe.planning.planner.find import MeasuredDevices, as_plan, plan
from farpipe.planning.planner.lattice import Estimate, Lattice
from farpipe.planning.planner.orders import QUICK
from farpipe.planning.planner.partition import peak_bytes
from farpipe.planning.planner.quote import Quote, inter_site_bytes, quote_of, quote_of_candidate
from farpipe.planning.planner.site_sets import Left

NEAR: Final = 1.1
"""Factor over the best estimate up to which a quote considers others; if none of them fits in memory, all points."""
MAX_KEPT: Final = 256
"""Largest number of pairs of a request and a cluster whose costs are kept; the oldest goes first."""


def quote(job: Job | Request, cluster: Cluster | None = None, profiles: MeasuredDevices = (), **left: Any) -> Quote:
    """Quote for a job, or for a request on `cluster`: the planner's estimates, without a search.

    `left` says what is left of the cluster, or how much of it may be used: arguments of `Planner.quote`, which is for
    many quotes in a row. Errors as for that.
    """
    expect_kind("quote: job", job, Request, "a Job, such as farpipe.load_job(FILE) reads, or a Request and a cluster")
    expect_kind("quote: cluster", cluster, (Cluster, NoneType), "a Cluster, such as job.cluster")
    request, on = (job.request, cluster or job.cluster) if isinstance(job, Job) else (job, cluster)
    if on is None:
        raise InputError("a request names no sites: give a cluster to quote it on")
    return Planner(profiles).quote(request, on, **left)


class Planner:
    """Answers "this request on this cluster, or on what is left of it".

    Stage costs are cached per (request, cluster) by identity: reuse the objects.
    """

    def __init__(self, profiles: MeasuredDevices = ()) -> None:
        self._profiles = tuple(profiles)
        self._known: dict[tuple[int, int], tuple[Request, Cluster, Lattice]] = {}

    def quote(
        self,
        request: Request,
        cluster: Cluster,
        *,
        devices: Mapping[str, int] | None = None,
        bytes_per_s: Mapping[str, float] | None = None,
        max_devices: int | None = None,
        simulated: int = 0,
    ) -> Quote:
        """Quote for `request` at its best on `cluster`, or on what is left of it.

        `devices` by site and `bytes_per_s` by directed link (``a>b``) say what is left; what is not named is free as it
        is, 0 is nothing. `max_devices`: in use at all sites. `simulated`: so many of the best points are simulated, and
        the quote is the best of them; with 0 it is an estimate by closed forms. InfeasibleError when nothing fits.
        With `data.packing` it is the quote of `plan` on what is left, and takes as long; no `max_devices` there.
        """
        if request.data.packing is not None and max_devices is None:
            left_over = left_of(cluster, devices or {}, bytes_per_s or {})
            return quote_of(plan(request.on(left_over), self._profiles_of(left_over)))
        lattice = self._lattice(request, cluster)
        left = lattice.left(devices or {}, bytes_per_s or {})
        most = max(1, simulated)
        quotes = self._best(lattice, left, most, lattice.estimates(left, 1, NEAR, max_devices, shared=True))
        if len(quotes) < most:  # what is near the best does not fit after all
            quotes = self._best(lattice, left, most, lattice.estimates(left, 1, 1.0, max_devices))
        if not quotes:
            raise InfeasibleError("no layout of this request fits what is left of the cluster")
        if not simulated:
            return quotes[0]
        job = lattice.job.model_copy(update={"cluster": left_of(cluster, devices or {}, bytes_per_s or {})})
        found = [_evaluated(job, lattice.costs, quote) for quote in quotes[:simulated]]
        known = [quote_of(as_plan(job, one)) for one in found if one is not None]
        return min(known, key=lambda q: q.step_s, default=quotes[0])

    def simulated(self, request: Request, cluster: Cluster, quote: Quote) -> Evaluated | None:
        """The layout of a `quote` for `request` on `cluster` in the best of the quick orders; None where none fits."""
        lattice = self._lattice(request, cluster)
        return _evaluated(lattice.job, lattice.costs, quote)

    def quotes(
        self,
        request: Request,
        cluster: Cluster,
        *,
        max_devices: int | None = None,
        most: int = 4,
    ) -> list[Quote]:
        """The best point of each of the `most` best site sets by closed forms, the fastest first; arguments as for
        `quote`."""
        lattice = self._lattice(request, cluster)
        left = lattice.left({}, {})
        return self._best(lattice, left, most, lattice.estimates(left, 1, 1.0, max_devices))

    def _best(self, lattice: Lattice, left: Left, most: int, found: Sequence[Sequence[Estimate]]) -> list[Quote]:
        """The `most` best of the first of every site set that fit, the fastest first."""
        quotes: list[Quote] = []
        for estimate in sorted((of_set[0] for of_set in found), key=lambda one: one.step_s):
            if len(quotes) >= most:
                break
            quote = _estimated(lattice, estimate, left.num_devices.tolist())
            quotes += [quote] if quote is not None else []
        return quotes

    def _lattice(self, request: Request, cluster: Cluster) -> Lattice:
        key = (id(request), id(cluster))
        if key not in self._known:
            job = decided(request.on(cluster))
            profiles = {one.device: one for one in self._profiles_of(cluster) if isinstance(one, Profile)}
            if len(self._known) >= MAX_KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = (request, cluster, Lattice(job, JobCosts(job.model, job.training, profiles)))
        return self._known[key][2]

    def _profiles_of(self, cluster: Cluster) -> MeasuredDevices:
        names = {site.device.name for site in cluster.sites}
        return [profile for profile in self._profiles if profile.device in names]


def _evaluated(job: Job, costs: JobCosts, quote: Quote) -> Evaluated | None:
    order = [job.cluster.site(name) for name in quote.sites]
    candidate = placed(job, order, quote.layout, quote.in_v)
    found = None if candidate is None else evaluate(job, candidate, costs, method=QUICK)
    return whole(found) if isinstance(found, Evaluated) else None


def _estimated(lattice: Lattice, estimate: Estimate, num_devices: Sequence[int]) -> Quote | None:
    """None where the layers do not fit after all: the estimate looks at the whole pipeline, not at every stage."""
    sites = [
        lattice.sites[index].model_copy(update={"num_devices": num_devices[index]}) for index in estimate.site_set.order
    ]
    candidate: Candidate | None = placed(lattice.job, sites, estimate.layout, estimate.in_v, linked=True)
    if candidate is None:
        return None
    try:
        peak = peak_bytes(lattice.job, candidate, lattice.costs)
    except InfeasibleError:
        return None
    sent = inter_site_bytes(lattice.costs, candidate)
    return quote_of_candidate(lattice.job, candidate, estimate.step_s, peak, sent, exact=False)


def left_of(cluster: Cluster, devices: Mapping[str, int], bytes_per_s: Mapping[str, float]) -> Cluster:
    """`cluster` with `devices` at its sites (by name; 0 leaves a site out) and `bytes_per_s` on its links (``a>b``).

    What is not named stays as it is; a link with a rate of 0 is left out. InfeasibleError when no device is left.
    """
    names = [site.name for site in cluster.sites if devices.get(site.name, site.num_devices)]
    if not names:
        raise InfeasibleError("no device is left at any site")
    part = cluster.within(names)
    sites = [s.model_copy(update={"num_devices": devices.get(s.name, s.num_devices)}) for s in part.sites]
    rated = [
        link.model_copy(update={"bandwidth_bytes_per_s": bytes_per_s.get(link.name, link.bandwidth_bytes_per_s)})
        for link in part.links
    ]
    links = tuple(link for link in rated if link.bandwidth_bytes_per_s > 0)
    return part.model_copy(update={"sites": tuple(sites), "links": links})
