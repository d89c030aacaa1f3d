import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.engine.transport.wire import (
    CONTROL_HEADER_BYTES,
    DATA_HEADER_BYTES,
    MAX_DESCRIPTION_BYTES,
    ControlFrame,
    ControlHeader,
    FragmentHeader,
    Tag,
    WireError,
    pack_control,
    pack_fragment,
    unpack_control,
    unpack_fragment,
)

LIMIT = 1 << 30
STAMPS = st.integers(-(1 << 62), 1 << 62)
HEADER = FragmentHeader(3, Tag(7, 1, 2), b"bfloat16 4x8", 64, 16, 32, 10, 20, 30)


@st.composite
def headers(draw):
    description = draw(st.binary(max_size=MAX_DESCRIPTION_BYTES))
    total = draw(st.integers(0, LIMIT))
    offset = draw(st.integers(0, total))
    size = draw(st.integers(0, total - offset))
    tag = Tag(draw(st.integers(0, 1 << 60)), draw(st.integers(0, 1 << 30)), draw(st.integers(-1, 1 << 30)))
    number = draw(st.integers(0, 1 << 60))
    return FragmentHeader(number, tag, description, total, offset, size, draw(STAMPS), draw(STAMPS), draw(STAMPS))


@given(headers())
def test_fragment_headers_survive_the_wire(header):
    assert unpack_fragment(pack_fragment(header), LIMIT) == header


RANKS = st.integers(-1, 1 << 30)


@given(
    st.tuples(st.integers(0, 256), st.integers(0, 1 << 20), RANKS, RANKS, STAMPS, STAMPS), st.sampled_from(ControlFrame)
)
def test_control_headers_survive_the_wire(numbers, kind):
    header = ControlHeader(kind, *numbers)
    assert unpack_control(pack_control(header)) == header


@given(st.binary(min_size=DATA_HEADER_BYTES, max_size=DATA_HEADER_BYTES))
def test_random_bytes_are_no_fragment(data):
    with pytest.raises(WireError):
        unpack_fragment(data, LIMIT)


@given(st.binary(min_size=CONTROL_HEADER_BYTES, max_size=CONTROL_HEADER_BYTES))
def test_random_bytes_are_no_control_frame(data):
    with pytest.raises(WireError):
        unpack_control(data)


@pytest.mark.parametrize(
    "change",
    [{"total_bytes": 40}, {"offset": 40}, {"fragment_bytes": 1 << 60}],
)
def test_sizes_that_contradict_each_other_are_refused(change):
    with pytest.raises(WireError):
        unpack_fragment(pack_fragment(HEADER._replace(**change)), LIMIT)


def test_a_message_over_the_limit_is_refused_before_memory_is_taken_for_it():
    huge = HEADER._replace(total_bytes=1 << 46)
    with pytest.raises(WireError, match="the limit is 1073741824"):
        unpack_fragment(pack_fragment(huge), LIMIT)


def test_a_description_that_is_too_long_is_refused():
    with pytest.raises(WireError, match="a data header of"):
        unpack_fragment(pack_fragment(HEADER._replace(description=bytes(MAX_DESCRIPTION_BYTES + 1))), LIMIT)


@pytest.mark.parametrize("change", [{"name_bytes": 257}, {"payload_bytes": (64 << 20) + 1}])
def test_an_oversized_control_frame_is_refused(change):
    header = ControlHeader(ControlFrame.POST, 1, 1, 0, 1, 0, 0)._replace(**change)
    with pytest.raises(WireError):
        unpack_control(pack_control(header))
