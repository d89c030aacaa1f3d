"""Corpora as people have them: tables, Megatron-LM's data sets, compressed text; damaged ones are named."""

import gzip
import json
import struct

import numpy as np
import pyarrow
import pytest
from pyarrow import ipc, parquet

from farpipe.core.errors import InputError
from farpipe.planning.workload import has_documents, read_lengths
from farpipe.planning.workload.tables import table_files, token_rows
from farpipe.planning.workload.token_files import expect_whole, read_index

DOCUMENTS = [[1, 2, 3], [4] * 300, [], [5, 6]]
LABELS = [[-100, 2, 3], [-100] * 299 + [4], [], [5, 6]]
TABLE = pyarrow.table({"input_ids": DOCUMENTS, "labels": LABELS})


def write_arrow(path, table, *, is_file):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = ipc.new_file if is_file else ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table)


def write_data_set(folder, table=TABLE, **state):
    """As save_to_disk of `datasets` 4."""
    write_arrow(folder / "data-00000-of-00001.arrow", table, is_file=False)
    found = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "1", **state}
    (folder / "state.json").write_text(json.dumps(found))
    (folder / "cache-1.arrow").write_text("left over by a map()")
    return folder


def write_megatron(path, documents, *, dtype="<u2", code=8):
    """Every document in sequences of at most 100 tokens."""
    pieces = [[d[i : i + 100] for i in range(0, len(d), 100)] for d in documents]
    sizes = np.array([len(piece) for each in pieces for piece in each], "<i4")
    places = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    firsts = np.cumsum([0, *map(len, pieces)], dtype="<i8")
    path.with_suffix(".bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, sizes.size, firsts.size)
    path.with_suffix(".idx").write_bytes(head + sizes.tobytes() + places.tobytes() + firsts.tobytes())


def test_tables_of_tokens_have_documents_in_every_form(tmp_path):
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    write_arrow(tmp_path / "file.arrow", TABLE, is_file=True)
    write_arrow(tmp_path / "stream.arrow", TABLE, is_file=False)
    write_data_set(tmp_path / "folder")
    write_data_set(tmp_path / "splits" / "train")
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name in ("a.parquet", "file.arrow", "stream.arrow", "folder", "splits"):
        assert has_documents(tmp_path / name, "text"), name
        (file,) = table_files(tmp_path / name)
        assert [tokens.tolist() for tokens, _ in token_rows(file)] == DOCUMENTS, name


def test_columns_of_lengths_and_of_texts(tmp_path):
    parquet.write_table(pyarrow.table({"num_tokens": [5, 7], "text": ["a", "b"]}), tmp_path / "a.parquet")
    assert read_lengths(tmp_path / "a.parquet").tolist() == [5, 7]
    assert not has_documents(tmp_path / "a.parquet", "text")
    parquet.write_table(pyarrow.table({"size": [5, 7], "text": ["a", "b"]}), tmp_path / "b.parquet")
    assert has_documents(tmp_path / "b.parquet", "text")
    assert read_lengths(tmp_path / "b.parquet", "size").tolist() == [5, 7]


def test_compressed_text_is_what_is_in_it(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"length,count\n5,2\n9,1\n"))
    with pyarrow.CompressedOutputStream(str(tmp_path / "b.jsonl.zst"), "zstd") as file:
        file.write(b'{"tokens": 5}\n{"tokens": 9}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'\n{"text": "a"}\n'))
    assert read_lengths(tmp_path / "a.csv.gz").tolist() == [5, 5, 9]
    assert read_lengths(tmp_path / "b.jsonl.zst").tolist() == [5, 9]
    assert has_documents(tmp_path / "c.jsonl.gz", "text")


def test_documents_of_megatron_are_those_of_its_index(tmp_path):
    write_megatron(tmp_path / "a", [[1, 2, 3], [4] * 300, [5, 6]])
    assert read_index(tmp_path / "a.idx").ends.tolist() == [3, 303, 305]


def test_columns_of_tokens_count_more_than_a_column_of_lengths_beside_them(tmp_path):
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2]], "length": [8]}), tmp_path / "a.parquet")
    assert has_documents(tmp_path / "a.parquet", "text")
    parquet.write_table(pyarrow.table({"input_ids": [[1]], "length": [8], "text": ["a"]}), tmp_path / "b.parquet")
    assert not has_documents(tmp_path / "b.parquet", "text")
    (tmp_path / "c.jsonl").write_text('{"text": null}\n')
    assert has_documents(tmp_path / "c.jsonl", "text"), "training says what is wrong with it"


def test_labels_and_masks_say_which_tokens_are_trained_on(tmp_path):
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    masks = [[0, 1, 1], [0] * 299 + [1], [], [1, 1]]
    parquet.write_table(pyarrow.table({"input_ids": DOCUMENTS, "loss_mask": masks}), tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"input_ids": DOCUMENTS}), tmp_path / "c.parquet")
    for name in ("a", "b"):
        found = [
            (tokens.tolist(), counted.astype(int).tolist())
            for tokens, counted in token_rows(tmp_path / f"{name}.parquet")
        ]
        assert found == list(zip(DOCUMENTS, masks, strict=True))
    assert [counted for _, counted in token_rows(tmp_path / "c.parquet")] == [None] * 4


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"body": ["a"]}, r"of texts \('text', or data\.text_key .*'input_ids'\), found 'body'; .*\(--column\)$"),
        ({"messages": ["a"]}, "chats need a template first"),
        ({"length": [1.5]}, "expected whole numbers of tokens, found double"),
        ({"length": [3, 0]}, r"row 1 \(from 0\): column 'length': 0 is no length of a sequence: .* tokens$"),
        ({"length": [1, *[2] * 1100, -3]}, r"row 1101 \(from 0\): column 'length': -3 is no length"),
        ({"length": pyarrow.array([1, 2**63 + 5], pyarrow.uint64())}, "row 1 .*: 9223372036854775813 is no length"),
        ({"length": [1, 2, None]}, r"row 2 \(from 0\): column 'length': there is no length \(null\)"),
        ({"length": pyarrow.array([], pyarrow.int64())}, "there are no rows"),
    ],
)
def test_what_has_no_lengths_is_refused(tmp_path, columns, problem):
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=problem):
        read_lengths(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (["abc"], "'input_ids': expected lists of whole numbers, found string"),
        ([[1.5]], "expected lists of whole numbers, found list"),
        ([None, [1]], r"a row is empty \(null\)"),
    ],
)
def test_what_are_no_tokens_is_refused(tmp_path, column, problem):
    parquet.write_table(pyarrow.table({"input_ids": column}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=problem):
        list(token_rows(tmp_path / "a.parquet"))


def test_damaged_tables_folders_and_archives_are_named(tmp_path):
    (tmp_path / "a.parquet").write_text("PAR1 and no more")
    (tmp_path / "a.arrow").write_text("nothing")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"5\n" * 1000)[:-9])
    (tmp_path / "a.txt.zst").write_text("nothing")
    write_data_set(tmp_path / "chosen", _indices_data_files=[{"filename": "indices.arrow"}])
    write_data_set(tmp_path / "state", _data_files=5)
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["one", "two"]}')
    for name, problem in (
        ("a.parquet", "not a table"),
        ("a.arrow", "not a table"),
        ("none.arrow", "can't be read"),
        ("a.txt.gz", "damaged or cut short"),
        ("a.txt.zst", "damaged or cut short"),
        ("chosen", r"flatten_indices\(\)"),
        ("state", "no _data_files"),
        ("splits", r"name one of them: .*splits/one, "),
    ):
        with pytest.raises(InputError, match=problem) as found:
            read_lengths(tmp_path / name)
        assert name in str(found.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: b"MMIDIDY" + data[7:], "not an index .*; regenerate it and its .bin"),
        (lambda data: data[:9] + b"\2" + data[10:], "version 2"),
        (lambda data: data[:17] + b"\7" + data[18:], "type 7: expected version 1 and whole numbers"),
        (lambda data: data[:-1], "is it whole"),
        (lambda data: data[:34] + b"\xff\xff\xff\xff" + data[38:], "damaged: sequence 0 has -1 tokens"),
        (lambda data: data[:-8] + b"\0" * 8, "damaged: documents from 0 to 0 of 5 sequences"),
        (
            lambda data: data[:-24] + struct.pack("<qq", 4, 1) + data[-8:],
            "out of order: document 1 begins with sequence 4 and ends before 1; regenerate it",
        ),
        (lambda data: data[:34] + b"\4" + data[35:], "not one after the other"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, change, problem):
    write_megatron(tmp_path / "a", [[1, 2, 3], [4] * 300, [5, 6]])
    path = tmp_path / "a.idx"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=problem):
        read_index(path)


def test_tokens_cut_short_are_named(tmp_path):
    write_megatron(tmp_path / "a", [[1, 2, 3]], dtype="<i4", code=4)
    (tmp_path / "a.bin").write_bytes(b"\0" * 8)
    with pytest.raises(InputError, match=r"a\.bin: has 8 bytes, but its index says 3 tokens of 4"):
        expect_whole(read_index(tmp_path / "a.idx"), tmp_path / "a.bin")
