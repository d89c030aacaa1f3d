"""Sites that train by themselves and exchange, in any layouts: the bits of one process with all of the model."""

import pytest
import torch

from farpipe.core.spec import LocalSteps
from farpipe.engine.outer.differences import difference
from farpipe.engine.outer.joined_sites import SitePlace
from farpipe.engine.outer.local_exchange import LocalExchange
from farpipe.engine.outer.outer_optimizer import fragments_of, mean_of, merge, outer_update
from in_process import Switchboard, run_ranks
from local_sites import SHAPES, THIRDS, WHOLE, first_weights, pieces_of, train, trained

COPIES = ((0, 1), (0, 1))
OVERLAPPING = ((0, 0.7), (0.4, 1))


class OneProcess:
    """All sites in one process: the mathematics as it reads."""

    def __init__(self, local, num_sites, tokens):
        self.local, self.tokens = local, tokens
        self.names = fragments_of({name: torch.Size(s).numel() for name, s in SHAPES.items()}, local.fragments)
        self.anchor = {name: first_weights(name) for name in SHAPES}
        self.momentum = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.sites = [{name: first_weights(name) for name in SHAPES} for _ in range(num_sites)]
        self.sent = {}

    def after(self, num_steps):
        for fragment in self.local.sent_after(num_steps):
            for name in self.names[fragment]:
                box = tuple((0, size) for size in SHAPES[name])
                self.sent[name] = [
                    difference(self.anchor[name] - site[name], box, self.local.wire_type).values for site in self.sites
                ]
        for fragment in self.local.merged_after(num_steps):
            for name in self.names[fragment]:
                mean = mean_of(self.sent.pop(name), self.tokens)
                outer_update(self.anchor[name], self.momentum[name], mean, self.local)
                for site in self.sites:
                    merge(site[name], self.anchor[name], self.local)


def run_sites(local, layouts, num_steps, tokens):
    """The pieces of every process after all steps, site after site, with its exchange."""
    places = [SitePlace(site, process) for site, layout in enumerate(layouts) for process in range(len(layout))]
    boards = [Switchboard(len(layout)) for layout in layouts]

    def process(outer):
        from in_process import InProcessPeers

        place = places[outer.rank]
        inner = InProcessPeers(boards[place.site], place.process)
        pieces = pieces_of(place.process, layouts[place.site])
        exchange = LocalExchange(local, pieces, inner, tokens[place.site])
        exchange.join(outer, place.site)
        train(pieces, place.site, range(num_steps), exchange)
        return place, pieces, exchange

    return run_ranks(len(places), process)


CASES = {
    "plain": LocalSteps(every=3),
    "diloco": LocalSteps(every=2, learning_rate=0.7, momentum=0.9),
    "streaming": LocalSteps(every=6, fragments=3, delay_steps=2, keep_local=0.5, momentum=0.5),
    "int8": LocalSteps(every=3, wire_type="int8", delay_steps=1),
    "int4": LocalSteps(every=4, fragments=2, delay_steps=3, keep_local=0.25, wire_type="int4"),
}


@pytest.mark.parametrize("local", CASES.values(), ids=CASES)
def test_sites_of_one_process_have_the_bits_of_the_plain_mathematics(local):
    tokens, steps = [3.0, 5.0], 13
    reference = OneProcess(local, 2, tokens)
    for step in range(steps):
        for number, site in enumerate(reference.sites):
            for name in SHAPES:
                site[name] = trained(site[name], name, number, step)
        reference.after(step + 1)
    for place, pieces, _ in run_sites(local, (WHOLE, WHOLE), steps, tokens):
        for piece in pieces:
            expected = reference.sites[place.site][piece.name.removeprefix("weight/")]
            assert torch.equal(piece.values, expected.view(-1))


@pytest.mark.parametrize("layouts", [(WHOLE, THIRDS), (COPIES, THIRDS), (OVERLAPPING, WHOLE, COPIES)])
@pytest.mark.parametrize("wire_type", ["none", "bf16"])
def test_sites_of_any_layout_have_the_same_bits(layouts, wire_type):
    local = LocalSteps(every=4, fragments=2, delay_steps=1, keep_local=0.5, momentum=0.9, wire_type=wire_type)
    tokens = [float(number + 1) for number in range(len(layouts))]
    plain = {p.site: pieces for p, pieces, _ in run_sites(local, (WHOLE,) * len(layouts), 9, tokens)}
    for place, pieces, _ in run_sites(local, layouts, 9, tokens):
        for mine, whole in zip(pieces, plain[place.site], strict=True):
            assert torch.equal(mine.values, whole.values[mine.start : mine.start + mine.values.numel()])


@pytest.mark.parametrize("wire_type", ["int8", "int4"])
def test_narrow_differences_keep_the_anchors_of_unlike_sites_equal(wire_type):
    """What is rounded depends on a site's own layout, but all sites have the same anchor: that is what matters."""
    local = LocalSteps(every=2, momentum=0.9, wire_type=wire_type)
    anchors = {}
    for place, _, exchange in run_sites(local, (THIRDS, OVERLAPPING), 6, [1.0, 1.0]):
        whole = anchors.setdefault(place.site, {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()})
        for piece in exchange.state():
            kind, name = piece.name.split("/")
            for box, values in piece.parts() if kind == "anchor" else ():
                whole[name][tuple(slice(*bounds) for bounds in box)] = values
    for name in SHAPES:
        assert torch.equal(anchors[0][name], anchors[1][name])


def test_each_difference_crosses_once_however_many_copies_a_site_has():
    count = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    found = run_sites(LocalSteps(every=2), (COPIES, THIRDS), 4, [1.0, 1.0])
    by_site = [0, 0]
    for place, _, exchange in found:
        by_site[place.site] += exchange.exchanged.sent_bytes
    assert by_site == [2 * 4 * count] * 2


def test_nothing_is_waited_for_before_it_is_due():
    local = LocalSteps(every=4, delay_steps=2)
    for _, _, exchange in run_sites(local, (WHOLE, WHOLE), 9, [1.0, 1.0]):
        assert exchange.num_merges == 1, "after 6 steps; what was sent after 8 is under way"
        assert [message.sent_after for message in exchange.exchanged.messages] == [4]
