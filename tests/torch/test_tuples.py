"""Tuples of tensors as one message."""

from contextlib import suppress

import pytest
import torch

from farpipe.core.errors import InputError, RunError
from farpipe.torch.stages import MAX_TENSORS, joined, parted


@pytest.mark.parametrize(
    "values",
    [
        (torch.ones(3, dtype=torch.uint8),),
        (None,),
        (),
        (torch.randn(2, 3), None, torch.arange(5), torch.empty(0, 4), torch.tensor(2.5, dtype=torch.float64)),
        (torch.randn(4, 6).t(), torch.randn(3).to(torch.bfloat16), torch.tensor([True, False])),
    ],
)
def test_values_come_back_as_they_were(values):
    found = parted(joined(values))
    assert len(found) == len(values)
    for one, other in zip(found, values, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


def test_one_tensor_is_its_own_message_and_keeps_its_memory():
    tensor = torch.randn(3, requires_grad=True)
    assert joined([tensor]).data_ptr() == tensor.data_ptr()
    assert parted(tensor) == (tensor,)


def test_too_many_and_other_layouts_are_refused():
    with pytest.raises(InputError, match="passes on 65 tensors; the limit is 64"):
        joined([torch.zeros(1)] * (MAX_TENSORS + 1))
    with pytest.raises(InputError, match="can't be sent"):
        joined([torch.zeros(2), torch.zeros(2).to_sparse()])


@pytest.mark.parametrize("change", [slice(0, 3), slice(0, 24), slice(0, -16)])
def test_cut_messages_are_refused(change):
    message = joined([torch.randn(4, 4), torch.arange(3)])[change]
    with pytest.raises(RunError, match="is no tuple of tensors"):
        parted(message)


def test_sizes_that_lie_are_refused():
    message = joined([torch.randn(4, 4), None])
    for place in range(len(message) - 64):
        changed = message.clone()
        changed[place] = 255
        with suppress(RunError):
            assert sum(one.nbytes for one in parted(changed) if one is not None) <= len(message)
