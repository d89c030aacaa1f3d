"""A quorum of sites is enough for an exchange: late reports count in the next one, and all have one anchor."""

import threading

import pytest
import torch

from farpipe.core.errors import InputError
from farpipe.core.spec import LocalSteps
from farpipe.engine.outer.differences import difference
from farpipe.engine.outer.joined_sites import SitePlace
from farpipe.engine.outer.local_exchange import LocalExchange
from farpipe.engine.outer.outer_optimizer import fragments_of, mean_of, merge, outer_update
from farpipe.engine.outer.rounds import Deciding, Report
from in_process import InProcessPeers, Switchboard, run_ranks
from local_sites import SHAPES, THIRDS, WHOLE, first_weights, pieces_of, train, trained

TWO_OF_THREE = LocalSteps(every=4, quorum=2, grace_s=0.3)


def report(site, number=0, tokens=1.0):
    return Report(site, number, tokens)


def test_a_round_is_closed_after_the_grace_and_what_comes_later_is_in_the_next():
    deciding = Deciding(TWO_OF_THREE, 3)
    deciding.take(0, report(1))
    assert deciding.decide(10.0) == [], "one is no quorum"
    deciding.take(0, report(0))
    assert deciding.decide(10.1) == []
    assert deciding.decide(10.39) == []
    (first,) = deciding.decide(10.41)
    assert first.reports == (report(0), report(1)), "in the order of the sites"
    deciding.take(0, report(2))
    assert deciding.decide(20.0) == []
    deciding.take(0, report(0, 1))
    deciding.take(0, report(1, 1))
    (second,) = deciding.decide(20.0)
    assert second.reports == (report(0, 1), report(1, 1), report(2)), "all are there: no grace"


def test_fragments_have_rounds_of_their_own():
    deciding = Deciding(LocalSteps(every=4, fragments=2, quorum=2), 3)
    for fragment, site in ((0, 0), (1, 1), (1, 2)):
        deciding.take(fragment, report(site))
    (found,) = deciding.decide(0.0)
    assert found.fragment == 1


def test_sites_that_have_finished_are_not_waited_for():
    deciding = Deciding(TWO_OF_THREE, 3)
    for site in (0, 1):
        deciding.take(0, report(site))
        deciding.finish(site)
    assert deciding.decide(0.0) == []
    deciding.take(0, report(2))
    assert len(deciding.decide(0.1)) == 1
    assert not deciding.is_over
    deciding.take(0, report(2, 1))
    assert len(deciding.decide(0.2)) == 1, "it goes on alone"
    deciding.finish(2)
    assert deciding.is_over


class Logged(LocalExchange):
    """Remembers which rounds it merged after which step."""

    def _take_rounds(self, world, rounds, num_steps):
        self.log = [*getattr(self, "log", []), (num_steps, rounds)]
        super()._take_rounds(world, rounds, num_steps)


def run_unlike(local, layouts, num_steps, tokens, pauses_s):
    """The exchange and pieces of every process; a site rests for so long before each of its steps."""
    places = [SitePlace(site, process) for site, layout in enumerate(layouts) for process in range(len(layout))]
    boards = [Switchboard(len(layout)) for layout in layouts]

    def process(outer):
        place = places[outer.rank]
        pieces = pieces_of(place.process, layouts[place.site])
        exchange = Logged(local, pieces, InProcessPeers(boards[place.site], place.process), tokens[place.site])
        exchange.join(outer, place.site)
        train(pieces, place.site, range(num_steps), exchange, pauses_s[place.site])
        exchange.finish(num_steps)
        assert exchange.is_joined, exchange.problem
        return place, pieces, exchange

    return run_ranks(len(places), process)


class Reference:
    """The same sites in one process, by the plain mathematics, given which reports were merged together and when."""

    def __init__(self, local, tokens, logs):
        self.local, self.tokens, self.logs, self.reports = local, tokens, logs, {}
        sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
        self.names = fragments_of(sizes, local.fragments)

    def run(self, num_steps):
        """Weights and anchor of every site."""
        self.found = {}
        waiting = [self.site(number, num_steps) for number in range(len(self.tokens))]
        while waiting:
            waiting = [site for site in waiting if next(site, "end") != "end"]
        return self.found

    def site(self, number, num_steps):
        weights = {name: first_weights(name) for name in SHAPES}
        anchor = {name: first_weights(name) for name in SHAPES}
        momentum = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        sent, since, log = 0, [0] * self.local.fragments, list(self.logs[number])
        for step in range(num_steps + 1):
            is_last = step == num_steps
            if not is_last:
                weights = {name: trained(weights[name], name, number, step) for name in SHAPES}
            done = min(step + 1, num_steps)
            if is_last:
                yield from self.merge(weights, anchor, momentum, log, done, until=self.is_final(number, sent))
            for fragment in range(self.local.fragments) if is_last else self.local.sent_after(done):
                for name in self.names[fragment]:
                    box = tuple((0, size) for size in SHAPES[name])
                    values = difference(anchor[name] - weights[name], box, self.local.wire_type).values
                    self.reports[number, sent, name] = values, self.tokens[number] * max(1, done - since[fragment])
                since[fragment], sent = done, sent + 1
            yield from self.merge(weights, anchor, momentum, log, done)
        self.found[number] = weights, anchor

    def is_final(self, number, sent):
        """True for the rounds that were merged after the last reports had been sent: they have one of them."""
        return lambda rounds: any(r.site == number and r.number >= sent for one in rounds for r in one.reports)

    def merge(self, weights, anchor, momentum, log, done, until=lambda rounds: False):
        while log and log[0][0] == done and not until(log[0][1]):
            _, rounds = log.pop(0)
            for one in rounds:
                for name in self.names[one.fragment]:
                    while any((r.site, r.number, name) not in self.reports for r in one.reports):
                        yield "waits"
                    values, tokens = zip(*(self.reports[r.site, r.number, name] for r in one.reports), strict=True)
                    outer_update(anchor[name], momentum[name], mean_of(values, tokens), self.local)
            for name in {name for one in rounds for name in self.names[one.fragment]}:
                merge(weights[name], anchor[name], self.local)


@pytest.mark.parametrize(
    "local",
    [
        LocalSteps(every=4, quorum=2, grace_s=0.0, learning_rate=0.7, momentum=0.9),
        LocalSteps(every=4, quorum=2, grace_s=0.01),
    ],
    ids=["at once", "with grace"],
)
def test_a_slow_site_holds_up_nobody_and_its_reports_count_in_the_next_round(local):
    tokens, num_steps = [1.0, 2.0, 3.0], 24
    found = run_unlike(local, (WHOLE, THIRDS, WHOLE), num_steps, tokens, (0.004, 0.004, 0.02))
    firsts = {place.site: exchange for place, _, exchange in found if place.process == 0}
    rounds = [one for _, every in firsts[0].log for one in every]
    assert len(rounds) == firsts[0].num_merges == firsts[1].num_merges == firsts[2].num_merges
    assert [one for _, every in firsts[2].log for one in every] == rounds, "all merge the same in the same order"
    merged = [(one.site, one.number) for every in rounds for one in every.reports]
    assert sorted(merged) == sorted(set(merged)), "each counts once"
    assert {site for site, _ in merged} == {0, 1, 2}
    assert any(len(every.reports) == 2 for every in rounds), "some went on without the slow one"
    late = [one for every in rounds for one in every.reports if one.site == 2]
    assert sum(one.tokens for one in late) >= 3.0 * num_steps, "none of its tokens is lost"
    expected = Reference(local, tokens, {site: one.log for site, one in firsts.items()}).run(num_steps)
    for place, pieces, _ in found:
        _, anchor = expected[place.site]
        for piece in pieces:
            name = piece.name.removeprefix("weight/")
            part = slice(piece.start, piece.start + piece.values.numel())
            assert torch.equal(anchor[name].view(-1)[part], piece.values), "all end with the anchor"
            assert torch.equal(expected[0][1][name], anchor[name])


def test_streaming_fragments_with_a_quorum_end_with_one_anchor():
    local = LocalSteps(every=6, fragments=2, delay_steps=2, keep_local=0.5, quorum=2, wire_type="int8", momentum=0.5)
    found = run_unlike(local, (WHOLE,) * 3, 25, [1.0] * 3, (0.002, 0.002, 0.01))
    anchors = [{p.name: p.values for p in exchange.state() if p.name.startswith("anchor")} for _, _, exchange in found]
    for other in anchors[1:]:
        assert all(torch.equal(values, other[name]) for name, values in anchors[0].items())
    assert len({exchange.num_merges for _, _, exchange in found}) == 1


def test_a_site_that_was_away_for_a_hundred_rounds_returns_to_the_others_anchor():
    local, away = LocalSteps(every=2, quorum=2, momentum=0.5), 200
    worlds = [Switchboard(3), Switchboard(2), Switchboard(3)]
    met = threading.Barrier(3)

    def site(outer):
        number = outer.rank
        pieces = pieces_of(0, WHOLE)
        exchange = LocalExchange(local, pieces, InProcessPeers(Switchboard(1), 0))
        exchange.join(InProcessPeers(worlds[0], number), number)
        train(pieces, number, range(4), exchange)
        exchange.leave("an outage")
        if number < 2:
            exchange.join(InProcessPeers(worlds[1], number), number)
            train(pieces, number, range(4, 4 + away), exchange)
            exchange.leave("the third is back")
        else:
            train(pieces, number, range(4, 9), exchange)  # by itself
        met.wait(60)
        step = exchange.join(InProcessPeers(worlds[2], number), number, 9 if number == 2 else 4 + away, waiting=True)
        assert step == 4 + away, "it goes on where the others are"
        before = exchange.num_merges
        train(pieces, number, range(step, step + 4), exchange)
        exchange.finish(step + 4)
        return pieces, exchange, before

    found = run_ranks(3, site)
    assert {before for _, _, before in found} == {2 + away // 2}
    for pieces, exchange, before in found[1:]:
        assert exchange.num_merges > before
        assert all(torch.equal(one.values, other.values) for one, other in zip(pieces, found[0][0], strict=True))


def test_fewer_sites_than_a_quorum_train_by_themselves():
    local = LocalSteps(every=2, quorum=3)
    found = run_unlike(local, (WHOLE, WHOLE), 6, [1.0, 1.0], (0.0, 0.0))
    for place, pieces, exchange in found:
        assert exchange.num_merges == exchange.exchanged.sent_bytes == 0
        for piece in pieces:
            name = piece.name.removeprefix("weight/")
            expected = first_weights(name)
            for step in range(6):
                expected = trained(expected, name, place.site, step)
            assert torch.equal(piece.values, expected.view(-1))


def test_a_grace_without_a_quorum_is_refused():
    with pytest.raises((InputError, ValueError), match="set quorum as well"):
        LocalSteps(grace_s=1.0)
