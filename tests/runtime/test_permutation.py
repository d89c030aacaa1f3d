import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.runtime.data.permutation import Permutation


@given(st.integers(1, 3000), st.integers(0, 5))
def test_every_number_comes_exactly_once(size, key):
    found = Permutation(size, key)(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


def test_it_depends_on_its_key_alone():
    places = np.arange(1000)
    assert (Permutation(1000, 1, 2)(places) == Permutation(1000, 1, 2)(places)).all()
    assert (Permutation(1000, 1, 2)(places) != Permutation(1000, 1, 3)(places)).any()
    assert (Permutation(1000, 1, 2)(places)[10:20] == Permutation(1000, 1, 2)(places[10:20])).all()


@pytest.mark.parametrize("size", [1000, 1024, 10**15])
def test_it_looks_shuffled(size):
    found = Permutation(size, 7)(np.arange(1000)) / size
    assert abs(found.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.1
    assert abs(np.corrcoef(found, np.arange(1000))[0, 1]) < 0.1
