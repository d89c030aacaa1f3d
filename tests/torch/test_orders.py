"""Which rank of a user's pipeline has which stage."""

import pytest
from torch import nn

from farpipe.core.errors import InputError
from farpipe.torch.orders import numbered, stage_owners


def parts(number):
    return [nn.Linear(1, 1) for _ in range(number)]


@pytest.mark.parametrize(
    ("method", "of_first", "of_second"),
    [("1f1b", [0], [1]), ("interleaved", [0, 3], [1, 4]), ("zbv", [0, 5], [1, 4]), ("wave", [0, 5], [1, 4])],
)
def test_modules_without_a_plan_are_dealt_in_turn_or_in_a_v(method, of_first, of_second):
    for rank, expected in enumerate([of_first, of_second]):
        assert [*numbered(parts(len(expected)), None, method, rank, 3)] == expected


def test_every_stage_is_on_one_rank():
    assert stage_owners([[0, 3], [1, 2]]) == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([[0, 1]], "over one rank has no peer to send to"),
        ([[0], [0]], "stage 0 is on rank 0 and again on rank 1"),
        ([[0, 0], [1]], "stage 0 is on rank 0 and again on rank 0"),
        ([[0], [2]], "stage 1 of 3 is on no rank"),
        ([[0, 1], []], "rank 1 has no stage"),
    ],
)
def test_stages_that_are_missing_or_there_twice_are_named(stages, words):
    with pytest.raises(InputError, match=words):
        stage_owners(stages)
