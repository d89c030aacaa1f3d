"""Tensors over the transport of bytes: every bit, whatever dtype and shape."""

import struct

import pytest
import torch

from farpipe.core.errors import InputError, RunError
from farpipe.engine.executor.peers import DTYPES, TensorPeers, describe, tensor_bytes, tensor_of
from farpipe.engine.executor.staging import message_memory
from farpipe.engine.transport import Tag
from transports import connected

SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 1, 3, 1, 2, 1, 1, 2)]


def random_tensor(dtype, shape):
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return (raw % 2).bool()[..., 0] if dtype is torch.bool else raw.view(dtype).reshape(shape)


def same_bits(one, other):
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


@pytest.fixture(scope="module")
def pair():
    with connected(allocate=message_memory("cpu")) as transports:
        yield [TensorPeers(transport) for transport in transports]


def test_every_bit_of_a_tensor_arrives(pair):
    sent = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    tensors = [random_tensor(dtype, shape) for dtype, shape in sent]
    for number, tensor in enumerate(tensors):
        pair[0].send(1, "forward", Tag(0, 0, number), tensor)
    for number, tensor in enumerate(tensors):
        message = pair[1].receive(0, "forward", Tag(0, 0, number), waiting_for="it")
        assert same_bits(message.tensor, tensor), sent[number]
        assert message.num_bytes == tensor.nbytes


def test_a_view_that_is_not_contiguous_arrives_as_it_looks(pair):
    tensor = torch.arange(24.0).reshape(4, 6).t()[::2].requires_grad_()
    pair[1].send(0, "backward", Tag(50, 0, 0), tensor)
    received = pair[0].receive(1, "backward", Tag(50, 0, 0), waiting_for="it").tensor
    assert torch.equal(received, tensor)
    assert not received.requires_grad


def test_received_memory_is_aligned_for_the_kernels_of_torch(pair):
    for number in range(20):
        pair[0].send(1, "forward", Tag(60, 0, number), torch.zeros(1 + 77 * number))
        assert pair[1].receive(0, "forward", Tag(60, 0, number), waiting_for="it").tensor.data_ptr() % 64 == 0


def test_what_can_not_be_sent_is_named():
    with pytest.raises(InputError, match="float8_e5m2fnuz"):
        describe(torch.empty(2, dtype=torch.float8_e5m2fnuz))
    with pytest.raises(InputError, match="9 dimensions"):
        describe(torch.zeros((1,) * 9))


def test_a_tensors_bytes_are_its_memory():
    tensor = torch.zeros(4, dtype=torch.int64)
    tensor_bytes(tensor)[8] = 5
    assert tensor.tolist() == [0, 5, 0, 0]
    tensor_of(tensor_bytes(tensor), describe(tensor))[0] = 7
    assert tensor.tolist() == [7, 5, 0, 0]


@pytest.mark.parametrize(
    ("num_bytes", "description"),
    [
        (8, b""),
        (8, b"\0"),
        (8, bytes([len(DTYPES), 0])),
        (8, bytes([0, 9])),
        (8, describe(torch.zeros(3))),
        (7, describe(torch.zeros(2))),
        (0, describe(torch.zeros(2))),
        (8, describe(torch.zeros(2))[:-1]),
        (0, bytes([0, 2]) + struct.pack("<2Q", 0, 1 << 62)),
        (8, bytes([0, 2]) + struct.pack("<2Q", 1 << 40, 1 << 40)),
    ],
    ids=str,
)
def test_bytes_that_are_no_tensor_are_refused(pair, num_bytes, description):
    with pytest.raises(ValueError):  # noqa: PT011 - what is wrong differs
        tensor_of(memoryview(bytes(num_bytes)), description)


def test_a_message_that_is_no_tensor_is_an_error_with_its_sender(pair):
    pair[0].transport.send(1, "forward", Tag(70, 0, 0), b"12345678", b"?")
    with pytest.raises(RunError, match=r"something: the forward message of step 70.* from rank 0 is no tensor"):
        pair[1].receive(0, "forward", Tag(70, 0, 0), waiting_for="something")
