"""Channels are opened before the first step, those that share a link one after the other."""

from collections import Counter

from farpipe.runtime import channels
from farpipe.runtime.channels import rounds
from farpipe.runtime.run_spec import RunSpec
from trainings import make_run


def test_every_channel_between_stages_is_opened_once(tmp_path):
    run = make_run(tmp_path / "text.txt", placement=(0, 1, 2))
    routes = [route for routes in rounds(run) for route in routes]
    assert sorted(routes) == [(0, 1, "forward"), (1, 0, "backward"), (1, 2, "forward"), (2, 1, "backward")]


def shared(run, monkeypatch):
    """Both processes of each rank at its own site, one link each way."""
    rank_of = [run.places.of(process).rank for process in range(run.num_processes)]
    pairs = [(a, b) for a, _ in enumerate(rank_of) for b, _ in enumerate(rank_of) if rank_of[a] != rank_of[b]]
    links = {(a, b): ("west>east" if rank_of[a] < rank_of[b] else "east>west", None) for a, b in pairs}
    monkeypatch.setattr(RunSpec, "links", lambda self: links)
    return links


def test_channels_that_share_a_link_are_opened_one_after_the_other(tmp_path, monkeypatch):
    run = make_run(tmp_path / "text.txt", num_replicas=2)
    links, found = shared(run, monkeypatch), rounds(run)
    routes = [route for routes in found for route in routes]
    across = Counter(links[route[:2]][0] for route in routes if route[:2] in links)
    assert len(found) == max(across.values()) > 1, "no link is shared"
    for routes in found:
        assert max(Counter(links[route[:2]][0] for route in routes).values()) == 1


def test_of_very_many_channels_on_a_link_several_are_opened_at_a_time(tmp_path, monkeypatch):
    run = make_run(tmp_path / "text.txt", num_replicas=2)
    shared(run, monkeypatch)
    monkeypatch.setattr(channels, "MAX_ROUNDS", 1)
    assert [len(routes) for routes in rounds(run)] == [4]
