"""Lengths from files, draws and cuts, and what they mean."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.planning.workload import read_lengths, sample_lengths, summarize
from farpipe.planning.workload.lengths import cut_lengths


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50))
def test_text_csv_and_array_hold_the_same(tmp_path_factory, lengths):
    folder = tmp_path_factory.mktemp("lengths")
    (folder / "a.txt").write_text("\n".join(map(str, lengths)) + "\n\n")
    rows = [f"x,{length},y" for length in lengths]
    (folder / "a.csv").write_text("\n".join(["kind,gpt2_tokens,repo", *rows]) + "\n")
    np.save(folder / "a.npy", np.array(lengths, np.int32))
    for name in ("a.txt", "a.csv", "a.npy"):
        assert read_lengths(folder / name).tolist() == lengths


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("5\n0\n", ":2: a sequence of 0 tokens"),
        ("5\n-3\n", ":2: expected the length"),
        ("5\n\n3.5\n", ":3: expected the length"),
        ("5\nmany\n", ":2: expected the length"),
        ("5\n99999999999999999999999\n", ":2: 9999"),
        ("kind,tokens\na,5\nb\n", ":3: expected 2 columns"),
        ("kind,tokens\na,five\n", ":2: expected the length"),
        ("kind,tokens\n", "no rows"),
        ("kind,bytes\na,5\n", "name the column"),
        ("tokens,length\n1,5\n", "name the column"),
        ("what is this?\n", "expected one number per line"),
        ('{"length": 5}\n{"len": 5}\n', ":2: expected an object with the key 'length'"),
        ('{"length": 5}\n[5]\n', ":2: expected an object"),
        ('{"length": 5}\n{"length": true}\n', ":2: expected the length"),
        ('{"length": 5.5}\n', ":1: expected the length"),
        ('{"length": 5\n', ":1"),
        ('{"id": 5, "text": "a"}\n', "name the column"),
        ("inf\n5\n7\n", ":1: expected the length"),
        ("nan\n5\n7\n", ":1: expected the length"),
        ("None\n5\n7\n", ":1: expected one number per line"),
        ("PAR1\0", "can't be read from Parquet; write its column"),
        ("ARROW1\0", "can't be read from Arrow; write its column"),
        ("length,count\n5,many\n", ":2: expected a number of sequences"),
        ("length,count\n5,0\n", "0 sequences; expected 1 to"),
        ("length,count\n5,99999999999\n", "99999999999 sequences; expected 1 to"),
    ],
)
def test_what_is_no_length_is_refused_with_its_line(tmp_path, text, place):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(InputError) as found:
        read_lengths(path)
    assert place in str(found.value)


def test_a_column_is_chosen_and_misspelt_ones_are_told(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text("tokens,length\n1,5\n")
    assert read_lengths(path, "length").tolist() == [5]
    with pytest.raises(InputError, match="did you mean 'length'"):
        read_lengths(path, "lenght")


@pytest.mark.parametrize("array", [np.array([1.5]), np.array([[1]]), np.array([], np.int64), np.array([3, 0])])
def test_an_array_that_holds_no_lengths_is_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(InputError):
        read_lengths(tmp_path / "a.npy")


def test_a_draw_depends_on_seed_and_step_alone_and_repeats_nothing():
    corpus = np.arange(1, 1001)
    first = sample_lengths(corpus, 100, 7, 3)
    assert first.tolist() == sample_lengths(corpus, 100, 7, 3).tolist()
    assert first.tolist() != sample_lengths(corpus, 100, 7, 4).tolist()
    assert np.unique(first).size == 100
    with pytest.raises(InputError, match="1001 sequences"):
        sample_lengths(corpus, 1001, 0)


def test_json_lines_and_histograms_are_read(tmp_path):
    lines, counts = tmp_path / "a.jsonl", tmp_path / "a.csv"
    lines.write_text('{"id": 7, "num_tokens": 5}\n\n{"num_tokens": 3, "id": 8}\n')
    assert read_lengths(lines).tolist() == [5, 3]
    assert read_lengths(lines, "id").tolist() == [7, 8]
    counts.write_text("length,count\n10,3\n20,0\n30,1\n")
    assert read_lengths(counts).tolist() == [10, 10, 10, 30]


def test_ends_alone_have_the_lengths_of_documents(tmp_path):
    np.save(tmp_path / "text.ends.npy", np.array([3, 3, 10]))
    assert read_lengths(tmp_path / "text.ends.npy").tolist() == [3, 7]


@pytest.mark.parametrize("name", ["a.npy", "a.ends.npy"])
def test_numbers_above_the_largest_signed_one_are_shown_as_they_are(tmp_path, name):
    np.save(tmp_path / name, np.array([5, 2**63 + 7], np.uint64))
    with pytest.raises(InputError, match="entry 1: 9223372036854775815"):
        read_lengths(tmp_path / name)


@pytest.mark.parametrize("folder", [".", "/"])
def test_a_folder_is_refused(folder):
    with pytest.raises(InputError, match="directory"):
        read_lengths(folder)


def test_tokens_without_ends_and_ends_that_go_back_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10))
    with pytest.raises(InputError, match=r"a\.ends\.npy"):
        read_lengths(tmp_path / "a.npy")
    np.save(tmp_path / "a.ends.npy", np.array([5, 3]))
    with pytest.raises(InputError, match="ascending"):
        read_lengths(tmp_path / "a.ends.npy")
    for name in ("a.npy", "a.bin", "a.idx"):
        with pytest.raises(InputError, match="an array has no column 'size'"):
            read_lengths(tmp_path / name, "size")


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 300))
def test_cutting_keeps_all_tokens(lengths, limit):
    pieces = cut_lengths(np.array(lengths), limit)
    assert pieces.sum() == sum(lengths)
    assert pieces.max() <= limit
    assert pieces.min() >= 1
    assert pieces.size == sum(-(-length // limit) for length in lengths)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=60))
def test_shares_beyond_a_length_are_those_of_a_count_by_hand(lengths):
    summary = summarize(np.array(lengths))
    for row in summary.beyond:
        longer = [length for length in lengths if length > row.tokens]
        assert row.num_sequences == len(longer)
        assert row.token_share == pytest.approx(sum(longer) / sum(lengths))
        assert row.most_slices == max((-(-length // row.tokens) for length in longer), default=0)


RNG = np.random.default_rng(0)
TEXT = np.minimum(RNG.zipf(1.2, 20_000), 49_999)
LENGTHS = np.clip(RNG.lognormal(6.5, 1.0, 20_000), 20, 1e6)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("tokens.npy", RNG.integers(1, 50_000, 20_000).astype(np.uint16)),
        ("part-0.npy", TEXT.astype(np.uint16)),
        ("train.npy", TEXT.astype(np.int64)),
        ("a.npy", RNG.integers(100, 128_000, 20_000).astype(np.uint32)),
        ("val.npy", RNG.integers(100, 128_000, 20_000).astype(np.int32)),
    ],
)
def test_an_array_that_looks_like_tokens_is_asked_about(name, array, tmp_path):
    np.save(tmp_path / name, array)
    with pytest.raises(InputError, match=r"or the tokens of a corpus.*--column length.*ends\.npy"):
        read_lengths(tmp_path / name)
    assert (read_lengths(tmp_path / name, "length") == array).all()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("a.npy", LENGTHS.astype(np.int64)),
        ("a.npy", LENGTHS.astype(np.uint32)),
        ("documents.npy", np.array([1, 2, 900], np.int64)),
        ("train_lengths.npy", TEXT.astype(np.uint16)),
        ("doc_lens.npy", RNG.integers(1, 50_000, 100).astype(np.uint16)),
    ],
)
def test_an_array_of_lengths_is_one(name, array, tmp_path):
    np.save(tmp_path / name, array)
    assert (read_lengths(tmp_path / name) == array).all()
