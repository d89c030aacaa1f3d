import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farpipe.errors import InputError
from farpipe.transport.message import Tag
from farpipe.transport.wire import (
    CONTROL_HEADER_BYTES,
    DATA_HEADER_BYTES,
    DTYPES,
    ChunkHeader,
    ControlFrame,
    ControlHeader,
    WireError,
    check_sendable,
    pack_chunk,
    pack_control,
    tensor_bytes,
    unpack_chunk,
    unpack_control,
)

LIMIT = 1 << 30
STAMPS = st.integers(-(1 << 62), 1 << 62)
HEADER = ChunkHeader(3, Tag(7, 1, 2), torch.bfloat16, (4, 8), 64, 16, 32, 10, 20, 30)


@st.composite
def headers(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=6)))
    dtype = draw(st.sampled_from(DTYPES))
    total = math.prod(shape) * dtype.itemsize
    offset = draw(st.integers(0, total))
    size = draw(st.integers(0, total - offset))
    tag = Tag(draw(st.integers(0, 1 << 60)), draw(st.integers(0, 1 << 30)), draw(st.integers(-1, 1 << 30)))
    number = draw(st.integers(0, 1 << 60))
    return ChunkHeader(number, tag, dtype, shape, total, offset, size, draw(STAMPS), draw(STAMPS), draw(STAMPS))


@given(headers())
def test_chunk_headers_survive_the_wire(header):
    assert unpack_chunk(pack_chunk(header), LIMIT) == header


@given(st.sampled_from(ControlFrame), st.integers(0, 256), st.integers(0, 1 << 20), STAMPS, STAMPS)
def test_control_headers_survive_the_wire(kind, name_bytes, payload_bytes, sent_ns, deliver_ns):
    header = ControlHeader(kind, name_bytes, payload_bytes, sent_ns, deliver_ns)
    assert unpack_control(pack_control(header)) == header


@given(st.binary(min_size=DATA_HEADER_BYTES, max_size=DATA_HEADER_BYTES))
def test_random_bytes_are_no_chunk(data):
    with pytest.raises(WireError):
        unpack_chunk(data, LIMIT)


@given(st.binary(min_size=CONTROL_HEADER_BYTES, max_size=CONTROL_HEADER_BYTES))
def test_random_bytes_are_no_control_frame(data):
    with pytest.raises(WireError):
        unpack_control(data)


@pytest.mark.parametrize(
    "change",
    [
        {"total_bytes": 65},
        {"shape": (4, 9)},
        {"offset": 40},
        {"shape": (1 << 40, 1 << 40), "total_bytes": 64},
        {"shape": (0, 1 << 63), "total_bytes": 0, "offset": 0, "chunk_bytes": 0},
        {"shape": (1 << 40, 0, 1 << 40), "total_bytes": 0, "offset": 0, "chunk_bytes": 0},
        {"chunk_bytes": 1 << 60},
    ],
)
def test_sizes_that_contradict_each_other_are_refused(change):
    with pytest.raises(WireError):
        unpack_chunk(pack_chunk(HEADER._replace(**change)), LIMIT)


def test_a_message_over_the_limit_is_refused_before_memory_is_taken_for_it():
    huge = HEADER._replace(shape=(1 << 45,), total_bytes=1 << 46)
    with pytest.raises(WireError, match="the limit is 1073741824"):
        unpack_chunk(pack_chunk(huge), LIMIT)


@pytest.mark.parametrize("dtype_code", [len(DTYPES), 255])
def test_an_unknown_dtype_is_refused(dtype_code):
    data = bytearray(pack_chunk(HEADER))
    data[4] = dtype_code
    with pytest.raises(WireError, match="unknown dtype"):
        unpack_chunk(data, LIMIT)


@pytest.mark.parametrize("change", [{"name_bytes": 257}, {"payload_bytes": (64 << 20) + 1}])
def test_an_oversized_control_frame_is_refused(change):
    header = ControlHeader(ControlFrame.POST, 1, 1, 0, 0)._replace(**change)
    with pytest.raises(WireError):
        unpack_control(pack_control(header))


def test_tensors_without_a_form_on_the_wire_are_named():
    with pytest.raises(InputError, match="complex64"):
        check_sendable(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InputError, match="9 dimensions"):
        check_sendable(torch.zeros((1,) * 9))


def test_a_tensors_bytes_are_its_memory():
    tensor = torch.zeros(4, dtype=torch.int64)
    tensor_bytes(tensor)[8] = 5
    assert tensor.tolist() == [0, 5, 0, 0]
