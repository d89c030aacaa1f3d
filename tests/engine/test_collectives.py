import pytest
import torch

from farpipe.engine.replicas import collectives
from farpipe.engine.replicas.collectives import Line, Ring, Rings
from farpipe.engine.replicas.places import Places
from in_process import run_ranks

REPLICAS = ["a", "aa", "ab", "aaa", "abc", "aabb", "aab", "aabbcc", "aaabbb"]
LENGTH = 1000


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    """Several pieces per share, more of them than may be under way."""
    monkeypatch.setattr(collectives, "PIECE_BYTES", 256)
    monkeypatch.setattr(collectives, "WINDOW", 2)


def together(sites, work):
    """``work(rings, line, flat)`` on all replicas of a pipeline of one rank; their padded tensors and lines."""
    places = Places(tuple((site,) for site in sites))

    def body(peers):
        rings = Rings(places.ring_levels(peers.rank), peers.rank)
        generator = torch.Generator().manual_seed(peers.rank)
        flat = torch.zeros(rings.padded(LENGTH))
        flat[:LENGTH] = torch.randn(LENGTH, generator=generator)
        line = Line(peers, 3, 1, "a test")
        before = flat.clone()
        work(rings, line, flat)
        return before, flat, line, rings

    return run_ranks(len(sites), body)


@pytest.mark.parametrize("sites", REPLICAS)
def test_all_get_the_same_sum(sites):
    found = together(sites, lambda rings, line, flat: rings.all_reduce(flat, line))
    expected = sum(before.double() for before, *_ in found)
    for _, flat, *_ in found:
        assert torch.equal(flat, found[0][1])
        assert torch.allclose(flat.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sites", REPLICAS)
def test_shares_of_the_sum_are_those_of_the_whole_sum_and_cover_it(sites):
    scattered = together(sites, lambda rings, line, flat: rings.reduce_scatter(flat, line))
    whole = together(sites, lambda rings, line, flat: rings.all_reduce(flat, line))[0][1]
    shares = sorted(rings.share(len(flat)) for _, flat, _, rings in scattered)
    ends = [end for _, end in shares]
    assert [start for start, _ in shares] == [0, *ends[:-1]]
    assert ends[-1] == len(whole)
    for _, flat, _, rings in scattered:
        mine = slice(*rings.share(len(flat)))
        assert torch.equal(flat[mine], whole[mine])


@pytest.mark.parametrize("sites", REPLICAS)
def test_everybody_gets_everybodys_share(sites):
    found = together(sites, lambda rings, line, flat: rings.all_gather(flat, line))
    for _, flat, _, _ in found:
        for before, _, _, others in found:
            theirs = slice(*others.share(len(flat)))
            assert torch.equal(flat[theirs], before[theirs])


@pytest.mark.parametrize(("sites", "share"), [("aabb", 1.0), ("aaabbb", 1.0), ("abc", 4 / 3), ("aabbcc", 4 / 3)])
def test_between_two_sites_a_sum_crosses_once_whatever_the_number_of_replicas(sites, share):
    """2 (S - 1) / S times the tensor over each directed link of a ring of S sites."""
    found = together(sites, lambda rings, line, flat: rings.all_reduce(flat, line))
    crossed = sum(
        size
        for process, (_, _, line, _) in enumerate(found)
        for other, size in line.sent_bytes.items()
        if sites[process] == "a" and sites[other] != "a"
    )
    assert crossed == pytest.approx(share * found[0][1].nbytes)


def test_a_sum_is_the_same_in_every_run():
    first, second = (together("aabb", lambda rings, line, flat: rings.all_reduce(flat, line))[0][1] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("more", [1, 2])
def test_shares_one_element_longer_than_others_may_need_a_piece_more(size, more):
    """A piece is 64 elements here."""

    def body(peers):
        flat = torch.full((64 * size + more,), float(peers.rank + 1))
        Ring(tuple(range(size)), peers.rank).all_reduce(flat, Line(peers, 0, 0, "a test"))
        return flat

    for flat in run_ranks(size, body):
        assert (flat == size * (size + 1) / 2).all()


def test_a_finished_piece_is_passed_on_before_the_sum_is_whole():
    said = []

    class Said(Line):
        def send(self, process, tensor):
            said.append((self._peers.rank, "sent"))
            super().send(process, tensor)

        def receive(self, process):
            said.append((self._peers.rank, "received"))
            return super().receive(process)

    def body(peers):
        flat = torch.ones(64 * 2 * 4)
        Ring((0, 1), peers.rank).all_reduce(flat, Said(peers, 0, 0, "a test"))

    run_ranks(2, body)
    order = [what for rank, what in said if rank == 0]
    assert order == ["sent", "sent", *["received", "sent"] * 6, "received", "received"], "no pause between the halves"
