"""Routes of packets where two sites have no link of their own: over as few others as possible."""

import math
from collections.abc import Iterable, Sequence

from farpipe.spec import SiteLink


def connected_sites(sites: Sequence[str], links: Iterable[SiteLink]) -> dict[str, list[str]]:
    """The sites that each site can talk with: there is a route there, and one back for TCP's acknowledgements."""
    routes = next_links(sites, links)
    return {a: [b for b in sites if a != b and {(a, b), (b, a)} <= routes.keys()] for a in sites}


def next_links(sites: Sequence[str], links: Iterable[SiteLink]) -> dict[tuple[str, str], SiteLink]:
    """(where a packet is, where it goes) -> the link that it takes next; pairs without a route are missing.

    Of several routes over equally many links it is the one with the least latency.
    """
    distances = {(a, b): (0.0, 0.0) if a == b else (math.inf, math.inf) for a in sites for b in sites}  # links, seconds
    first: dict[tuple[str, str], SiteLink] = {}
    for link in links:
        distances[link.source, link.target], first[link.source, link.target] = (1.0, link.latency_s), link
    for middle in sites:  # Floyd and Warshall
        for source in sites:
            for target in sites:
                (links_there, there_s), (links_on, on_s) = distances[source, middle], distances[middle, target]
                if (links_there + links_on, there_s + on_s) < distances[source, target]:
                    distances[source, target] = (links_there + links_on, there_s + on_s)
                    first[source, target] = first[source, middle]
    return first
