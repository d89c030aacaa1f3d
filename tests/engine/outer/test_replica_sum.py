"""Sums over sites: the same bits whoever computes a share."""

from functools import partial

import pytest
import torch

from farpipe.engine.outer.replica_sum import Gradient, add, shares_of, sum_over
from transports import connected, in_parallel


def gradients(num_sites, length):
    generator = torch.Generator().manual_seed(length)
    return {
        site: Gradient(torch.randn(length, generator=generator) * 10**site, site + 0.1) for site in range(num_sites)
    }


@pytest.mark.parametrize(
    ("num_sites", "members"),
    [(2, (0, 1)), (3, (0, 1)), (3, (0, 2)), (3, (1, 2)), (3, (0, 1, 2)), (4, (0, 1)), (4, (0, 1, 3))],
)
@pytest.mark.parametrize("length", [1, 5, 3_000_001])
def test_the_sum_has_the_same_bits_whoever_computes_a_share(members, num_sites, length):
    every = gradients(num_sites, length)
    expected = add(every)

    def work(transport):
        mine = {site: every[site] for site in shares_of(members[transport.rank], members, num_sites)}
        return sum_over(transport, 3, mine, members, num_sites)

    with connected(len(members)) as transports:
        results = in_parallel(*(partial(work, transport) for transport in transports))
    for found in results:
        assert torch.equal(found.flat, expected.flat)
        assert found.loss == expected.loss


def test_shares_of_sites_that_are_away_are_divided_and_none_twice():
    for members in [(0,), (1, 3), (0, 1, 2), (4, 2)]:
        found = [share for member in members for share in shares_of(member, members, 5)]
        assert sorted(found) == [0, 1, 2, 3, 4]
