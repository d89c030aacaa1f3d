"""Cutting and packing: every token once, no two tails in a chunk, limits kept, compiled as plain."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.planning.cost.chunk_laws import Law
from farpipe.planning.workload import followed
from farpipe.planning.workload.chunk import Chunk, Slice, load_of
from farpipe.planning.workload.cut import Cut, cut_batch, num_slices_within, pack, slice_offsets
from sound_chunks import check_chunks

LAWS = st.builds(Law, st.floats(0, 1e-6), st.floats(1e-9, 1e-4), split_pair_s=st.just(0.0) | st.floats(0, 1e-6))
LENGTHS = st.lists(st.one_of(st.integers(1, 50), st.integers(1, 20_000)), min_size=1, max_size=60)
LAW = Law(1e-9, 1e-5)


def seconds_upto(law, tokens):
    return law.pair_s * tokens**2 / 2 + law.token_s * tokens


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(LENGTHS, LAWS, st.floats(1e-4, 1.0), st.integers(1, 30_000), st.sampled_from(["best-fit", "literal"]))
def test_every_token_is_in_one_chunk_and_no_chunk_has_two_tails(lengths, law, share, limit, rule):
    target = share * sum(seconds_upto(law, length) for length in lengths)
    chunks = cut_batch(lengths, Cut(target, limit, rule), law).chunks()
    check_chunks(chunks, lengths)
    assert all(sum(part.is_tail for part in chunk.slices) <= 1 for chunk in chunks)
    assert all(chunk.num_tokens <= limit for chunk in chunks)
    for index, before in enumerate(followed(chunks)):
        assert before in (None, index - 1)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, LAWS, st.integers(1, 30_000))
def test_short_sequences_fill_chunks_up_to_a_limit_and_longer_ones_stay_alone_and_whole(lengths, law, limit):
    total_s = sum(seconds_upto(law, length) for length in lengths)
    chunks = cut_batch(lengths, Cut(total_s, max(lengths), fill_limit=limit), law).chunks()
    check_chunks(chunks, lengths)
    assert all(chunk.num_tokens <= limit or len(chunk.slices) == 1 for chunk in chunks)
    assert sum(len(chunk.slices) for chunk in chunks) == len(lengths)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, LAWS, st.floats(1e-3, 1.0), st.integers(64, 30_000))
def test_best_fit_keeps_the_time_target_but_for_the_rounding_of_a_slice(lengths, law, share, limit):
    target = share * sum(seconds_upto(law, length) for length in lengths)
    cut = Cut(target, limit)
    offsets = slice_offsets(max(lengths), num_slices_within(max(lengths), cut, law), law)
    of_slot = law.of_slices if len(offsets) > 1 else law
    slots = np.diff([seconds_upto(of_slot, x) for x in [0, *offsets]])
    chunks = cut_batch(lengths, cut, law).chunks()
    for chunk, seconds in zip(chunks, law.of_load(load_of(chunks)), strict=True):
        assert seconds <= max(target * (1 + 1e-6), slots.max() * (1 + 1e-9)) or len(chunk.slices) == 1


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 10**7), st.integers(1, 200), LAWS)
def test_slices_take_equal_time_as_far_as_tokens_are_whole(length, count, law):
    count = min(count, length)
    offsets = slice_offsets(length, count, law)
    assert offsets[-1] == length
    assert (np.diff([0, *offsets]) >= 1).all()
    if length > 100 * count:
        law = law.of_slices
        slots = np.diff([seconds_upto(law, float(x)) for x in [0, *offsets]])
        token_s = law.pair_s * length + law.token_s
        assert np.ptp(slots) <= 2.01 * token_s + 1e-9 * slots.sum()


def test_slices_get_shorter_along_a_sequence():
    """64K tokens in four, where attention over them takes 0.64 of the time of all else over 32K (a 7B model)."""
    slices = np.diff([0, *slice_offsets(65536, 4, Law(2 * 1.967e-5, 1.0))])
    assert slices.tolist() == pytest.approx([25106, 16254, 13009, 11167], abs=2)


def plain_pack(shorts, tails, cut, law):
    """Best fit decreasing, as one would write it down."""
    bins = [[seconds_upto(law.of_slices, s + n) - seconds_upto(law.of_slices, s), n] for s, n in tails]
    found = []
    for tokens in shorts:
        seconds = seconds_upto(law, tokens)
        open_bins = [b for b in range(len(bins)) if bins[b][1] + tokens <= cut.token_limit]
        timely = [b for b in open_bins if bins[b][0] + seconds <= cut.target_s * (1 + 1e-9)]
        if timely:
            best = max(timely, key=lambda b: (bins[b][0], -b))
        elif cut.rule == "literal" and open_bins:
            best = min(open_bins, key=lambda b: (bins[b][0], b))
        else:
            best = len(bins)
            bins.append([0.0, 0])
        bins[best][0] += seconds
        bins[best][1] += tokens
        found.append(best)
    return found


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 4000), max_size=40) | st.lists(st.sampled_from([1, 2, 3, 900, 4000]), max_size=80),
    st.lists(st.tuples(st.integers(1, 9000), st.sampled_from([1, 2, 900]) | st.integers(1, 3000)), max_size=8),
    st.floats(1e-5, 0.2),
    st.integers(4000, 20_000),
    st.sampled_from(["best-fit", "literal"]),
)
def test_the_compiled_packing_is_the_plain_one(shorts, tails, target, limit, rule):
    shorts = np.array(sorted(shorts, reverse=True), np.int64)
    cut = Cut(target, limit, rule)
    found = pack(shorts, np.array(tails, np.int64).reshape(-1, 2), cut, LAW)
    assert found.tolist() == plain_pack(shorts.tolist(), tails, cut, LAW)


def test_calls_of_attention_fill_chunks_too():
    law = Law(token_s=1.0, call_s=10.0)
    alike, unlike = (cut_batch(lengths, Cut(100.0, 1000), law).chunks() for lengths in ([5] * 12, range(4, 14)))
    assert len(alike) == 1
    assert max(law.of_load(load_of(unlike))) <= 100 < sum(range(4, 14)) + 9 * law.call_s


@settings(deadline=None, max_examples=40)
@given(LENGTHS)
def test_the_load_of_a_table_is_that_of_its_chunks(lengths):
    table = cut_batch(lengths, Cut(0.05, 10_000), LAW)
    for one, other in zip(table.load, load_of(table.chunks()), strict=True):
        assert np.asarray(one).tolist() == pytest.approx(np.asarray(other).tolist())


def test_the_literal_rule_fills_up_to_the_longest_slice_and_makes_heavier_chunks():
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(7, 1.6, 512).astype(np.int64), 1, 60_000)
    target = seconds_upto(LAW, float(lengths.max())) / 8
    ours, theirs = (cut_batch(lengths, Cut(target, 40_000, rule), LAW).chunks() for rule in ("best-fit", "literal"))
    slices = [part.length for chunk in theirs for part in chunk.slices if part.length < part.sequence_length]
    assert max(chunk.num_tokens for chunk in theirs) <= max(slices)
    heaviest = [LAW.of_load(load_of(chunks)).max() for chunks in (ours, theirs)]
    assert heaviest[0] < heaviest[1]


@settings(deadline=None, max_examples=40)
@given(LENGTHS)
def test_the_same_lengths_give_the_same_chunks(lengths):
    cut = Cut(0.05, 10_000)
    assert cut_batch(lengths, cut, LAW).chunks() == cut_batch(np.array(lengths), cut, LAW).chunks()


def test_one_token_sequences_and_one_giant():
    chunks = cut_batch([1] * 1000 + [1_000_000], Cut(0.5, 50_000), LAW).chunks()
    check_chunks(chunks, [1] * 1000 + [1_000_000])
    assert {chunk.kind for chunk in chunks} <= {"split", "hybrid", "batched"}


def test_an_empty_sequence_is_named():
    with pytest.raises(InputError, match=r"lengths\[1\]"):
        cut_batch([3, 0, 2], Cut(1.0, 10), LAW).chunks()


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([[(0, 0, 3, 5)]], "ends at 3 of 5"),
        ([[(0, 0, 3, 5)], [(0, 2, 3, 5)]], "goes on at 3"),
        ([[(0, 0, 5, 5)], [(0, 0, 5, 5)]], "goes on at 5"),
        ([[(1, 0, 5, 5)]], "no sequence 1"),
        ([[(0, 0, 3, 5)], [(0, 3, 2, 5)], []], "index"),
    ],
)
def test_chunks_that_miss_or_repeat_tokens_are_refused(chunks, message):
    made = [Chunk(tuple(Slice(*part) for part in parts)) for parts in chunks if parts]
    if message == "index":
        assert check_chunks(made, [5]) is None
    else:
        with pytest.raises(InputError, match=message):
            check_chunks(made, [5])


@settings(deadline=None, max_examples=40)
@given(LENGTHS)
def test_chunks_survive_json(lengths):
    chunks = cut_batch(lengths, Cut(0.02, 5_000), LAW).chunks()
    assert [Chunk.from_data(chunk.to_data()) for chunk in chunks] == chunks


@pytest.mark.parametrize(
    "data",
    [[], {}, [{"sequence": 0}], [{"sequence": 0, "start": 4, "length": 2, "sequence_length": 5}], [[0, 0, 1, 1]]],
)
def test_a_chunk_that_is_none_is_refused(data):
    with pytest.raises(InputError):
        Chunk.from_data(data)
