"""Channels are opened before the first step, those that share a link one after the other."""

from collections import Counter

import pytest

from farpipe.engine.executor import channels
from farpipe.engine.executor.channels import rounds
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.train import train_rank
from in_process import InProcessPeers, run_ranks
from small_models import TIED
from trainings import make_run

BETWEEN_STAGES = [(0, 1, "forward"), (1, 0, "backward"), (1, 2, "forward"), (2, 1, "backward")]


def opened(run):
    return sorted(route for routes in rounds(run) for route in routes)


def test_every_channel_between_stages_is_opened_once(tmp_path):
    untied = TIED.model_copy(update={"tied_embeddings": False})
    run = make_run(tmp_path / "text.txt", model=untied, placement=(0, 1, 2))
    assert opened(run) == BETWEEN_STAGES


def test_so_are_those_between_the_copies_of_tied_weights(tmp_path):
    run = make_run(tmp_path / "text.txt", placement=(0, 1, 2))
    assert opened(run) == sorted([*BETWEEN_STAGES, (0, 2, "sync"), (2, 0, "sync")])


@pytest.mark.slow
@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize(("placement", "num_replicas"), [((0, 1), 1), ((0, 1), 2), ((0, 1, 1, 0), 2), ((0,), 4)])
def test_exactly_the_channels_that_a_training_sends_on_are_opened(
    tmp_path, monkeypatch, placement, num_replicas, zero1
):
    used, send = set(), InProcessPeers.send

    def noted(self, peer, kind, tag, tensor):
        used.add((self.rank, peer, kind))
        send(self, peer, kind, tag, tensor)

    monkeypatch.setattr(InProcessPeers, "send", noted)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    shape = {"placement": placement, "num_replicas": num_replicas, "method": "gpipe"}
    run = make_run(text, num_steps=2, zero1=zero1, **shape)
    run_ranks(run.num_processes, lambda peers: train_rank(run, peers, tmp_path))
    assert used
    assert opened(run) == sorted(used)


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
        assert max(Counter(links[route[:2]][0] for route in routes if route[:2] in links).values()) == 1


def test_of_very_many_channels_on_a_link_several_are_opened_at_a_time(tmp_path, monkeypatch):
    run = make_run(tmp_path / "text.txt", num_replicas=2)
    shared(run, monkeypatch)
    monkeypatch.setattr(channels, "MAX_ROUNDS", 1)
    assert len(rounds(run)) == 1
    assert Counter(kind for _, _, kind in opened(run)) == {"forward": 2, "backward": 2, "sync": 8}


class Opener:
    """A transport that notes which channels it opens, and when the others wait for it."""

    def __init__(self, rank):
        self.rank, self.done = rank, []

    def open(self, target, kind):
        self.done.append((self.rank, target, kind))

    def await_channels(self, limit_s):
        self.done.append("wait")

    def exchange(self, name, payload, *, waiting_for):
        self.done.append(name)


def test_a_process_opens_the_channels_that_begin_there_and_meets_the_others_after_each_round(tmp_path, monkeypatch):
    run = make_run(tmp_path / "text.txt", num_replicas=4)
    shared(run, monkeypatch)
    for rank in range(run.num_processes):
        transport, expected = Opener(rank), []
        channels.open_channels(run, transport)
        for number, routes in enumerate(rounds(run)):
            expected += [*(route for route in routes if route[0] == rank), "wait", f"channels {number}"]
        assert transport.done == expected
    assert len(rounds(run)) > 1
