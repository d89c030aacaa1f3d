"""Routes between sites that have divided a model in different ways."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.engine.checkpoint.boxes import boxes_of_run, sizes_of
from farpipe.engine.outer.routes import Held, expect_one_model, owned, routes

SHAPES = {"a": (4, 6), "b": (7,), "c": (3, 2)}


@st.composite
def sites(draw):
    """What one to four processes have: every parameter cut into runs, some with copies at further processes."""
    count = draw(st.integers(1, 4))
    found = [[] for _ in range(count)]
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        for start, end in pairwise(cuts):
            for process in draw(st.sets(st.integers(0, count - 1), min_size=1)):
                found[process] += [Held(name, box) for box in boxes_of_run(shape, start, end)]
    return found


def _places(box):
    return [
        tuple(int(c) + start for c, (start, _) in zip(at, box, strict=True))
        for at in torch.ones(sizes_of(box)).nonzero()
    ]


@settings(deadline=None, max_examples=40)
@given(one=sites(), other=sites())
def test_each_element_has_one_owner_at_each_site_and_crosses_once(one, other):
    names = [*SHAPES]
    owners = [owned(one), owned(other)]
    whole = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for site in owners:
        places = [(held.name, *place) for process in site for held in process for place in _places(held.box)]
        assert len(places) == len(set(places)) == whole
    crossing = []
    for number, mine in enumerate(owners[0]):
        there = routes(mine, dict(enumerate(owners[1])), names, out=True)
        for route in there:
            back = routes(owners[1][route.process], {number: mine}, names, out=False)
            assert [part.box for part in back[0].parts] == [part.box for part in route.parts], "one order at both ends"
            for sent, taken in zip(route.parts, back[0].parts, strict=True):
                name = mine[sent.number].name
                assert owners[1][route.process][taken.number].name == name
                crossing += [(name, *place) for place in _places(sent.box)]
    assert len(crossing) == len(set(crossing)) == whole


def test_names_choose_a_fragment():
    mine = [Held("a", ((0, 4), (0, 6))), Held("b", ((0, 7),))]
    (route,) = routes(mine, {3: mine}, {"b"}, out=True)
    assert (route.process, [part.number for part in route.parts]) == (3, [1])


def test_sites_with_other_models_are_refused():
    with pytest.raises(InputError, match=r"site 0 and site 1 do not train one model: they differ in b"):
        expect_one_model({"site 0": [[Held("b", ((0, 7),))]], "site 1": [[Held("b", ((0, 8),))]]})
