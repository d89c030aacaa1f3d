"""The outer optimizer: torch's SGD on mean differences, in any parts; fragments of a model."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.engine.local_losses import MODELS, Way, measure
from farpipe.core.errors import InputError
from farpipe.core.spec import LocalSteps
from farpipe.engine.outer.outer_optimizer import fragments_of, mean_of, merge, outer_update

NUM = 40


def random_like(seed, count=NUM):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9), (0.4, 0.5)])
def test_it_is_sgd_with_nesterov_s_momentum(rate, momentum):
    settings = LocalSteps(learning_rate=rate, momentum=momentum)
    anchor, speed = random_like(0), torch.zeros(NUM)
    theirs = torch.nn.Parameter(anchor.clone())
    sgd = torch.optim.SGD([theirs], lr=rate, momentum=momentum, nesterov=momentum > 0)
    for step in range(5):
        mean = mean_of([random_like(10 + step), random_like(20 + step)], [1.0, 1.0])
        theirs.grad = mean.clone()
        sgd.step()
        outer_update(anchor, speed, mean, settings)
        torch.testing.assert_close(anchor, theirs.detach())


def test_a_plain_mean_gives_all_sites_the_mean_of_their_weights():
    anchor, sites = random_like(0), [random_like(1), random_like(2)]
    expected, settings = (sites[0] + sites[1]) / 2, LocalSteps()
    outer_update(anchor, torch.zeros(NUM), mean_of([anchor - site for site in sites], [1, 1]), settings)
    for site in sites:
        merge(site, anchor, settings)
        torch.testing.assert_close(site, expected)
        assert torch.equal(site, anchor)


def test_sites_count_by_their_tokens():
    one, other = random_like(1), random_like(2)
    torch.testing.assert_close(mean_of([one, other], [300, 100]), 0.75 * one + 0.25 * other)


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(1, NUM - 1), momentum=st.floats(0, 0.99), rate=st.floats(0.1, 1.5), keep=st.floats(0, 0.9))
def test_parts_get_the_bits_of_the_whole(cut, momentum, rate, keep):
    settings = LocalSteps(learning_rate=rate, momentum=momentum, keep_local=keep)

    def updated(part):
        anchor, speed, weights = (random_like(seed)[part].clone() for seed in (0, 1, 2))
        mean = mean_of([random_like(3)[part], random_like(4)[part], random_like(5)[part]], [3, 5, 7])
        outer_update(anchor, speed, mean, settings)
        merge(weights, anchor, settings)
        return torch.stack([anchor, speed, weights])

    assert torch.equal(updated(slice(None)), torch.cat([updated(slice(cut)), updated(slice(cut, None))], dim=1))


def test_a_share_of_the_local_weights_is_kept():
    weights, anchor = torch.ones(4), torch.zeros(4)
    merge(weights, anchor, LocalSteps(keep_local=0.25))
    assert weights.tolist() == [0.25] * 4


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30), data=st.data())
def test_fragments_are_runs_of_parameters_none_empty_none_lost(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    named = {f"p{number}": size for number, size in enumerate(sizes)}
    found = fragments_of(named, count)
    assert [name for names in found for name in names] == [*named]
    assert len(found) == count
    assert all(found)


def test_equal_layers_are_divided_evenly():
    found = fragments_of({f"layer {number}": 10 for number in range(9)}, 3)
    assert [len(names) for names in found] == [3, 3, 3]


def test_more_fragments_than_parameters_are_refused():
    with pytest.raises(InputError, match=r"training\.local_steps\.fragments: 3 is more than the 2 parameters"):
        fragments_of({"a": 1, "b": 2}, 3)


def test_the_benchmark_of_losses_trains_every_kind_of_way():
    for way in (Way("whole", 12), Way("half", 12, is_half=True), Way("mean", 12, LocalSteps(every=4))):
        found = measure(MODELS["28k"], way, 0)
        assert (found["way"], found["num_steps"]) == (way.name, 12)
        assert found["loss"] < math.log(256), "less than of a guess"
