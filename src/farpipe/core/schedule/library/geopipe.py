"""GeoPipe: 1F1B with extra warm-up forwards upstream of every cut between sites (arXiv 2510.12064)."""

from collections.abc import Mapping, Sequence

from farpipe.core.errors import UsageError
from farpipe.core.schedule.library.eager import as_many_as_help, hidden_by, with_extra
from farpipe.core.step import Hop, Problem, Schedule, upstream_sums


def geopipe(problem: Problem, extra: Sequence[int] | None = None) -> Schedule:
    """Every stage at or upstream of a cut does the extra forwards of that cut before it alternates.

    `extra` has one count per hop between sites, in pipeline order; None: what hides its round trip, as far as memory
    allows and no fewer are faster.
    """
    cuts = [index for index, hop in enumerate(problem.hops) if hop is not None and _is_cut(hop, problem.between_sites)]
    given = [hidden_by(problem, cut) for cut in cuts] if extra is None else list(extra)
    if len(given) != len(cuts) or any(count < 0 for count in given):
        raise UsageError(f"extra forwards: expected a count of at least 0 for each of {len(cuts)} cuts, found {given}")
    of_hop = dict(zip(cuts, given, strict=True))
    per_stage = upstream_sums([of_hop.get(index, 0) for index in range(len(problem.hops))])
    return (as_many_as_help if extra is None else with_extra)(problem, per_stage, "geopipe")


def _is_cut(hop: Hop, between: Mapping[str, bool]) -> bool:
    transfers = [transfer for transfer in (hop.forward, hop.backward) if transfer is not None]
    names = [(t.link,) if isinstance(t.link, str) else t.link for t in transfers]
    return any(between[name] for some in names for name in some)
