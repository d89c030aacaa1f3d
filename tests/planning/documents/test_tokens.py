import gzip
import json
import os
import threading
import time
from itertools import chain

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from farpipe.core.errors import InputError, RunError
from farpipe.core.spec import Data
from farpipe.planning.documents import documents, known_files, token_cache, tokens
from farpipe.planning.documents.documents import Encoded, LearnedTokenizer
from farpipe.planning.documents.known_files import OpenedFile
from farpipe.planning.documents.tokens import SAMPLED_BYTES, Tokens, load_tokens

WORDS = {"[unk]": 0, "<end>": 1, "the": 2, "quick": 3, "brown": 4, "fox": 5, "\n": 6}


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer of six words; its file."""
    learned = Tokenizer(models.WordLevel(WORDS, unk_token="[unk]"))
    learned.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "model" / "tokenizer.json"
    path.parent.mkdir()
    learned.save(str(path))
    return path


def data_of(tmp_path, name, content, **options):
    """A Data for a file with that content."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Data(source=str(path), cache=str(tmp_path / "cache"), **options)


def listed(data):
    return np.concatenate(load_tokens(data).shards).tolist()


def test_the_standard_library_is_real_text_and_large_enough_for_a_demo():
    found = load_tokens(Data(source="stdlib"))
    assert found.num_tokens > 1_000_000
    assert found.vocab_size == 256
    assert b"import collections" in found.shards[0].tobytes()


def test_a_folder_is_read_in_order_of_names_without_hidden_files(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("first")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\xff\xfe")
    assert bytes(listed(Data(source=str(tmp_path)))) == b"first\n\nsecond"


def test_json_lines_and_parquet_have_documents(tmp_path):
    lines = data_of(tmp_path, "a.jsonl", '{"text": "ä b", "x": 1}\n\n{"text": "c"}\n')
    assert bytes(listed(lines)) == "ä b\n\nc".encode()
    other = data_of(tmp_path, "b.jsonl", '{"body": "c"}\n', text_key="body")
    assert bytes(listed(other)) == b"c"
    parquet.write_table(pyarrow.table({"text": ["ä b", "c"], "n": [1, 2]}), tmp_path / "c.parquet")
    columns = Data(source=str(tmp_path / "c.parquet"), cache=str(tmp_path / "cache"))
    assert bytes(listed(columns)) == "ä b\n\nc".encode()


def test_a_tokenizer_makes_tokens_with_an_end_behind_every_document(tmp_path, tokenizer):
    lines = '{"text": "the quick"}\n{"text": "brown cow"}\n'
    data = data_of(tmp_path, "a.jsonl", lines, tokenizer=str(tokenizer.parent), end_of_text="<end>")
    found = load_tokens(data)
    assert found.shards[0].tolist() == [2, 3, 1, 4, 0, 1]
    assert (found.shards[0].dtype, found.vocab_size) == (np.uint16, 7)
    assert listed(data.model_copy(update={"end_of_text": None})) == [2, 3, 4, 0]


def test_long_documents_are_tokenized_in_pieces_with_one_end(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(documents, "MAX_PIECE_CHARS", 20)
    text = "the quick\nbrown fox\nthe quick brown fox\nfox\n" + "the " * 20
    assert "".join(documents.pieces(text)) == text
    assert max(map(len, documents.pieces(text))) <= 20
    data = data_of(tmp_path, "a.txt", text, tokenizer=str(tokenizer), end_of_text="<end>")
    assert listed(data) == [WORDS[word] for word in text.split()] + [1]


def test_text_is_tokenized_once(tmp_path, tokenizer, monkeypatch):
    data = data_of(tmp_path, "a.txt", "the fox", tokenizer=str(tokenizer))
    assert listed(data) == [2, 5]
    kept = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert [name.partition(".")[2] for name in kept] == ["bin", "ends.npy", "json"]
    monkeypatch.setattr(token_cache, "_write_tokens", lambda *_: pytest.fail("it is in the cache"))
    assert listed(data) == [2, 5]


@pytest.mark.parametrize("change", ["text", "tokenizer", "end"])
def test_the_cache_notices_every_change(change, tmp_path, tokenizer):
    data = data_of(tmp_path, "a.txt", "the fox", tokenizer=str(tokenizer))
    assert listed(data) == [2, 5]
    if change == "text":
        (tmp_path / "a.txt").write_text("the cow")
        assert listed(data) == [2, 0]
    elif change == "tokenizer":
        tokenizer.write_text(tokenizer.read_text().replace('"fox": 5', '"fox": 4').replace('"brown": 4', '"brown": 5'))
        assert listed(data) == [2, 4]
    else:
        assert listed(data.model_copy(update={"end_of_text": "<end>"})) == [2, 5, 1]


def test_several_ranks_may_begin_to_tokenize_at_once(tmp_path, tokenizer, monkeypatch):
    written, write = [], token_cache._write_tokens
    monkeypatch.setattr(token_cache, "_write_tokens", lambda *given: (written.append(1), write(*given)))
    data = data_of(tmp_path, "a.txt", "the quick brown fox\n" * 5000, tokenizer=str(tokenizer))
    found = []
    threads = [threading.Thread(target=lambda: found.append(load_tokens(data))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [item.num_tokens for item in found] == [20000] * 4
    assert len({item.digest for item in found}) == 1
    assert len([*(tmp_path / "cache").iterdir()]) == 3, "nothing temporary is left"
    assert written == [1], "the others have waited"


def test_a_crash_while_tokenizing_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    data = data_of(tmp_path, "a.txt", "the fox", tokenizer=str(tokenizer))

    def broken(*_):
        yield Encoded(np.array([2], np.uint16), False)
        raise KeyboardInterrupt

    monkeypatch.setattr(LearnedTokenizer, "encoded", broken)
    with pytest.raises(KeyboardInterrupt):
        load_tokens(data)
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".lock"}, "of which nobody is the owner"
    monkeypatch.undo()
    assert listed(data) == [2, 5]


def test_a_text_that_changes_while_it_is_tokenized_is_not_kept_under_its_old_digest(tmp_path, tokenizer, monkeypatch):
    data, file = data_of(tmp_path, "a.txt", "the fox", tokenizer=str(tokenizer)), tmp_path / "a.txt"

    def changing(data, files):
        file.write_text("the quick fox")
        yield from documents(data, files)

    documents = token_cache.documents
    monkeypatch.setattr(token_cache, "documents", changing)
    with pytest.raises(InputError, match=r"a\.txt: has changed while it was read"):
        load_tokens(data)
    monkeypatch.undo()
    file.write_text("the fox")
    assert listed(data) == [2, 5]


def test_large_texts_of_bytes_are_mapped_from_the_cache(tmp_path, monkeypatch):
    data = data_of(tmp_path, "a.txt", "some text")
    in_memory = load_tokens(data)
    monkeypatch.setattr(tokens, "IN_MEMORY_BYTES", 4)
    mapped = load_tokens(data)
    assert isinstance(mapped.shards[0], np.memmap)
    assert mapped.shards[0].tolist() == in_memory.shards[0].tolist()
    assert mapped.digest == in_memory.digest


def test_arrays_of_tokens_are_mapped(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.uint16))
    (tmp_path / "b.bin").write_bytes(np.arange(7, dtype="<u4").tobytes())
    header = {"format": "farpipe/tokens/1", "dtype": "uint32", "num_tokens": 7, "vocab_size": 9}
    (tmp_path / "b.json").write_text(json.dumps(header))
    both = load_tokens(Data(source=str(tmp_path)))
    assert [shard.tolist() for shard in both.shards] == [[*range(5)], [*range(7)]]
    assert both.vocab_size == 9
    assert load_tokens(Data(source=str(tmp_path / "a.npy"))).vocab_size == 5, "it doesn't say"
    assert load_tokens(Data(source=str(tmp_path / "b.bin"))).vocab_size == 9
    assert all(isinstance(shard, np.memmap) for shard in both.shards)


def test_what_can_not_be_read_is_named(tmp_path, tokenizer):
    cases = [
        (Data(source=str(tmp_path / "nothing")), r"no file or folder '.*nothing'; \"stdlib\" is always there"),
        (data_of(tmp_path, "image.png", b"ab\xff\xd8"), r"image\.png: not UTF-8 text \(byte 2\)"),
        (data_of(tmp_path, "a.jsonl", '{"text": "x"}\n{"text": 5}\n'), r"a\.jsonl:2: expected an object with text"),
        (data_of(tmp_path, "b.jsonl", "{}\n"), r"b\.jsonl:1: expected an object with text under 'text'"),
        (data_of(tmp_path, "c.jsonl", '{"text": \n'), r"c\.jsonl:1: not JSON"),
        (data_of(tmp_path, "d.parquet", "PAR1 no"), r"d\.parquet: not a table of Parquet"),
        (data_of(tmp_path, "e.npy", "no"), r"e\.npy: not an array"),
        (data_of(tmp_path, "empty.npy", ""), r"empty\.npy: not an array"),
        (data_of(tmp_path, "f.bin", "no"), r"f\.bin: neither a header f\.json nor .*f\.idx beside"),
        (data_of(tmp_path, "t.txt", "x", tokenizer=str(tmp_path / "a.jsonl")), r"data\.tokenizer: .*not a tokenizer"),
        (data_of(tmp_path, "t.txt", "x", tokenizer=str(tokenizer), end_of_text="<eos>"), "has no token '<eos>'"),
        (data_of(tmp_path, "t.txt", "x", tokenizer=str(tmp_path / "absent.json")), r"absent\.json: can't be read"),
    ]
    for data, message in cases:
        with pytest.raises(InputError, match=message):
            load_tokens(data)


def test_arrays_that_are_no_tokens_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(InputError, match="expected whole numbers with one axis, found float64"):
        load_tokens(Data(source=str(tmp_path / "a.npy")))
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="not an array of NumPy's"):
        load_tokens(Data(source=str(tmp_path / "a.npy")))
    np.save(tmp_path / "a.npy", np.array([3, -1]))
    with pytest.raises(InputError, match=r"a\.npy: tokens are counted from 0, but there is a -1"):
        load_tokens(Data(source=str(tmp_path / "a.npy")))
    (tmp_path / "b.bin").write_bytes(b"12345")
    (tmp_path / "b.json").write_text('{"format": "farpipe/tokens/1", "dtype": "uint16", "num_tokens": 3}')
    with pytest.raises(InputError, match=r"b\.bin: has 5 bytes, but its header says 3 tokens of 2"):
        load_tokens(Data(source=str(tmp_path / "b.bin")))
    header = {"format": "farpipe/tokens/1", "dtype": "uint8", "num_tokens": 5, "vocab_size": "many"}
    (tmp_path / "b.json").write_text(json.dumps(header))
    with pytest.raises(InputError, match=r"b\.json: expected dtype .*, num_tokens and perhaps vocab_size"):
        load_tokens(Data(source=str(tmp_path / "b.bin")))


def test_tokens_are_told_by_the_ends_of_their_names(tmp_path):
    with pytest.raises(InputError, match=r"tokens are in files that end in \.npy or \.bin"):
        load_tokens(data_of(tmp_path, "a.dat", "x", format="tokens"))


def test_a_folder_of_several_kinds_needs_a_word(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"a\.txt is text, but .*b\.jsonl is jsonl; give data\.format"):
        load_tokens(Data(source=str(tmp_path)))
    assert load_tokens(Data(source=str(tmp_path), format="text")).num_tokens == 5
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no files in it"):
        load_tokens(Data(source=str(tmp_path / "empty")))


def test_a_cache_that_can_not_be_written_is_told(tmp_path, tokenizer):
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(RunError, match=r"can't be written: .*data\.cache names"):
        load_tokens(data_of(tmp_path, "a.txt", "the", tokenizer=str(tokenizer)))


@pytest.fixture
def reads(monkeypatch):
    """The names of the files of text whose content was hashed; files count as settled at once."""
    found, read = [], known_files._hash
    monkeypatch.setattr(known_files, "SETTLED_NS", -(10**9))
    monkeypatch.setattr(
        known_files, "_hash", lambda file: (file.suffix == ".txt" and found.append(file.name), read(file))[1]
    )
    return found


def two_texts(tmp_path, tokenizer):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the fox")
    (tmp_path / "texts" / "b.txt").write_text("brown")
    return Data(source=str(tmp_path / "texts"), cache=str(tmp_path / "cache"), tokenizer=str(tokenizer))


def test_files_are_hashed_once(tmp_path, tokenizer, reads):
    data = two_texts(tmp_path, tokenizer)
    assert listed(data) == listed(data) == [2, 5, 4]
    assert reads == ["a.txt", "b.txt"]


def test_a_file_that_has_just_been_changed_is_hashed_every_time(tmp_path, tokenizer, reads, monkeypatch):
    monkeypatch.undo()
    data = two_texts(tmp_path, tokenizer)
    assert listed(data) == [2, 5, 4]
    assert not [*(tmp_path / "cache").glob("known-*")], "another change could have the same times"


@pytest.mark.parametrize("how", ["in place", "with its old times", "by another file", "longer"])
def test_a_changed_file_is_noticed(how, tmp_path, tokenizer, reads):
    data = two_texts(tmp_path, tokenizer)
    file = tmp_path / "texts" / "a.txt"
    before = file.stat()
    assert listed(data) == [2, 5, 4]
    content = "the quick fox" if how == "longer" else "fox the"
    if how == "by another file":
        (tmp_path / "new").write_text(content)
        os.utime(tmp_path / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
        (tmp_path / "new").replace(file)
    else:
        time.sleep(0.02)  # longer than a file system's clock needs for a tick
        file.write_text(content)
    if how == "with its old times":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert listed(data) == [2, 3, 5, 4] if how == "longer" else listed(data) == [5, 2, 4]
    assert reads == ["a.txt", "b.txt", "a.txt"]


def test_an_opened_file_that_is_overwritten_is_noticed_though_its_time_is_put_back(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("the fox")
    opened, before = OpenedFile.of(file), file.stat()
    time.sleep(0.02)  # longer than a file system's clock needs for a tick
    file.chmod(0o600)
    opened.expect_unchanged("is another")
    with file.open("r+") as same:
        same.write("fox the")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InputError, match=r"a\.txt: is another"):
        opened.expect_unchanged("is another")


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"format": "farpipe/known-files/1", "files": 5}', "digest", "unwritable"]
)
def test_facts_that_are_damaged_are_found_anew(damage, tmp_path, tokenizer, reads):
    data = two_texts(tmp_path, tokenizer)
    expected = listed(data)
    (facts,) = (tmp_path / "cache").glob("known-*")
    if damage == "unwritable":
        facts.unlink()
        facts.mkdir()
    else:
        wrong = facts.read_text().replace('"sha256": "', '"sha256": "x')
        facts.write_text(wrong if damage == "digest" else damage)
    assert listed(data) == expected
    assert reads == ["a.txt", "b.txt"] * 2


def test_an_array_without_a_header_is_looked_through_once(tmp_path, reads, monkeypatch):
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.uint16))
    data = Data(source=str(tmp_path / "a.npy"), cache=str(tmp_path / "cache"))
    assert load_tokens(data).vocab_size == 5
    (facts,) = (tmp_path / "cache").glob("known-*")
    facts.write_text(facts.read_text().replace("[0, 4]", "[0, 6]"))
    assert load_tokens(data).vocab_size == 7, "from what was kept"
    facts.write_text(facts.read_text().replace("[0, 6]", '"no"'))
    assert load_tokens(data).vocab_size == 5


@pytest.mark.slow
def test_no_change_of_a_large_text_goes_unseen(tmp_path, monkeypatch):
    """However far from the blocks that are looked at."""
    text = bytes(2 * SAMPLED_BYTES)
    place = 70_000  # in the second block, which is passed over
    other = text[:place] + b"x" + text[place + 1 :]
    arrays = [Tokens((np.frombuffer(content, np.uint8),), 256) for content in (text, other)]
    assert arrays[0].digest == arrays[1].digest, "that is why"
    for in_memory in (True, False):
        monkeypatch.setattr(tokens, "IN_MEMORY_BYTES", 1 << 30 if in_memory else 4)
        found = [load_tokens(data_of(tmp_path, "a.txt", content)).digest for content in (text, other, text)]
        assert found[0] == found[2] != found[1]


def mapped_tokens(tmp_path, numbers=range(100), **header):
    """A file of tokens, opened."""
    (tmp_path / "a.bin").write_bytes(np.array(numbers, "<u2").tobytes())
    body = {"format": "farpipe/tokens/1", "dtype": "uint16", "num_tokens": len(numbers), "vocab_size": 100} | header
    (tmp_path / "a.json").write_text(json.dumps(body))
    return load_tokens(Data(source=str(tmp_path / "a.bin"), cache=str(tmp_path / "cache")))


def read(tokens, start, stop, how=Tokens.read):
    """Tokens of the first shard, or whether they are trained on."""
    return how(tokens, *(np.array([place]) for place in (0, start, stop)))[0].tolist()


def test_a_batch_looks_at_each_file_twice_however_many_sequences_it_has(tmp_path, monkeypatch):
    found, looks = mapped_tokens(tmp_path), []
    before = OpenedFile.expect_unchanged
    monkeypatch.setattr(OpenedFile, "expect_unchanged", lambda *args: (looks.append(1), before(*args)))
    starts = np.arange(0, 90, 3)
    assert len(found.read(np.zeros_like(starts), starts, starts + 5)) == 30
    assert len(looks) == 2


@pytest.mark.parametrize("how", ["in place", "shorter", "another file", "gone"])
@pytest.mark.parametrize("name", ["a.bin", "a.counted.npy"])
def test_tokens_that_change_while_they_are_trained_on_are_refused(name, how, tmp_path):
    """And the marks of those that are trained on."""
    np.save(tmp_path / "a.counted.npy", np.arange(100) % 2)
    found, file = mapped_tokens(tmp_path), tmp_path / name
    assert read(found, 3, 6) == [3, 4, 5]
    assert read(found, 3, 6, Tokens.read_counted) == [True, False, True]
    time.sleep(0.02)  # longer than a file system's clock needs for a tick
    if how == "in place":
        with file.open("r+b") as opened:
            opened.write(b"x")
    elif how == "shorter":
        os.truncate(file, 10)
    else:
        file.rename(tmp_path / "old.bin")
        if how == "another file":
            file.write_bytes((tmp_path / "old.bin").read_bytes())
    with pytest.raises(InputError, match=rf"{name}: (was changed while it is trained on|can't be read)"):
        read(found, 90, 95, Tokens.read if name == "a.bin" else Tokens.read_counted)


def test_a_token_above_the_vocabulary_is_named(tmp_path):
    found = mapped_tokens(tmp_path, [1, 2, 300, 4])
    assert read(found, 0, 2) == [1, 2]
    with pytest.raises(InputError, match=r"a\.bin: token 2 is 300, but vocab_size says 100"):
        read(found, 1, 4)


def test_a_damaged_cache_is_refused_at_the_next_start(tmp_path, tokenizer):
    data = data_of(tmp_path, "a.txt", "the fox", tokenizer=str(tokenizer))
    assert listed(data) == [2, 5]
    (kept,) = (tmp_path / "cache").glob("*.bin")
    kept.write_bytes(bytes([2, 0, 4, 0]))
    with pytest.raises(InputError, match=r"\.bin: is damaged: its SHA-256 is not that of its header; remove it"):
        load_tokens(data)
    kept.unlink()
    assert listed(data) == [2, 5]


def test_waiting_for_another_tokenizer_has_an_end(tmp_path, tokenizer, monkeypatch):
    data = data_of(tmp_path, "a.txt", "the fox", tokenizer=str(tokenizer))
    begun, go_on = threading.Event(), threading.Event()
    write = token_cache._write_tokens

    def slow(*given):
        begun.set()
        assert go_on.wait(30)
        write(*given)

    monkeypatch.setattr(token_cache, "_write_tokens", slow)
    first = threading.Thread(target=lambda: load_tokens(data))
    first.start()
    assert begun.wait(30)
    monkeypatch.setattr(token_cache, "LIMIT_S", 0.2)
    with pytest.raises(RunError, match=r"\.lock: waited 0\.2 s for another process that tokenizes the text"):
        load_tokens(data)
    go_on.set()
    first.join(30)
    assert listed(data) == [2, 5]


def test_compressed_json_lines_are_trained_on_as_plain_ones(tmp_path):
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    plain = listed(data_of(tmp_path, "a.jsonl", lines))
    assert listed(data_of(tmp_path, "b.jsonl.gz", gzip.compress(lines))) == plain
    assert listed(data_of(tmp_path, "c.txt.gz", gzip.compress(b"one\n\ntwo"))) == plain


def test_prompts_are_read_and_not_trained_on(tmp_path, tokenizer):
    lines = '{"ask": "the quick", "text": "fox"}\n{"ask": "", "text": "brown fox"}\n'
    given = {"prompt_key": "ask", "tokenizer": str(tokenizer), "end_of_text": "<end>"}
    found = load_tokens(data_of(tmp_path, "a.jsonl", lines, **given))
    assert found.shards[0].tolist() == [2, 3, 5, 1, 4, 5, 1]
    assert found.ends[0].tolist() == [4, 7]
    assert found.counted[0].tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert found.num_counted == 5
    other = load_tokens(data_of(tmp_path, "b.jsonl", lines.replace("ask", "no"), **given | {"prompt_key": "no"}))
    assert other.digest == found.digest
    assert not load_tokens(data_of(tmp_path, "a.jsonl", lines, tokenizer=str(tokenizer))).is_masked
    with pytest.raises(InputError, match=r"expected an object with text under 'none' \(data\.prompt_key\)"):
        load_tokens(data_of(tmp_path, "a.jsonl", lines, prompt_key="none"))
    with pytest.raises(InputError, match=r"data\.prompt_key: .*a\.txt is text and has no keys"):
        load_tokens(data_of(tmp_path, "a.txt", "fox", prompt_key="ask"))


def test_tables_of_tokens_are_trained_on_as_they_are(tmp_path):
    from planning.workload.test_corpora import DOCUMENTS, LABELS, write_data_set

    found = load_tokens(Data(source=str(write_data_set(tmp_path / "set")), cache=str(tmp_path / "cache")))
    assert found.shards[0].tolist() == [*chain(*DOCUMENTS)]
    assert found.ends[0].tolist() == [3, 303, 305]
    assert found.vocab_size == 7
    assert found.counted[0].tolist() == [label != -100 for label in chain(*LABELS)]
    with pytest.raises(InputError, match=r"data\.prompt_key: .* has tokens"):
        load_tokens(Data(source=str(tmp_path / "set"), cache=str(tmp_path / "cache"), prompt_key="ask"))


def test_padding_is_neither_read_nor_trained_on(tmp_path):
    ids, masks = [[0, 1, 2, 3], [4, 5, 0, 0], [0, 0]], [[0, 1, 1, 1], [1, 1, 0, 0], [0, 0]]
    labels = [[-100, -100, 2, 3], [4, 5, 0, 0], [0, 0]]
    parquet.write_table(
        pyarrow.table({"input_ids": ids, "attention_mask": masks, "labels": labels}), tmp_path / "a.parquet"
    )
    found = load_tokens(Data(source=str(tmp_path / "a.parquet"), cache=str(tmp_path / "cache")))
    assert found.shards[0].tolist() == [1, 2, 3, 4, 5]
    assert found.lengths.tolist() == [3, 2]
    assert found.counted[0].tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"body": ["a"]}, r"no column 'text' \(data\.text_key\), only body; name the column .*'input_ids'$"),
        ({"messages": ["a"]}, "only messages; .*chats need a template first"),
        ({"text": ["a", "", None]}, r"row 2 \(from 0\): .*'text' \(data\.text_key\): there is none \(null\)"),
        ({"text": [1]}, r"row 0 \(from 0\): expected an object with text under 'text' .*found 1, which is"),
        ({"input_ids": [[1], [1, 2]], "labels": [[1], [1]]}, r"row 1 \(from 0\): 2 tokens, but 1 in column 'labels'"),
        (
            {"input_ids": [[1, 2, 3, 4]], "attention_mask": [[0, 1, 0, 1]]},
            r"row 0 \(from 0\): attention_mask is 0 at token 2",
        ),
    ],
)
def test_tables_that_can_not_be_trained_on_name_row_cause_and_remedy(tmp_path, columns, problem):
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=problem):
        load_tokens(Data(source=str(tmp_path / "a.parquet"), cache=str(tmp_path / "cache")))


def test_a_folder_called_like_a_table_is_a_folder_of_tables(tmp_path):
    (tmp_path / "a.parquet").mkdir()
    data = Data(source=str(tmp_path / "a.parquet"), cache=str(tmp_path / "cache"))
    with pytest.raises(InputError, match="has no files in it"):
        load_tokens(data)
    parquet.write_table(pyarrow.table({"text": ["abc"]}), tmp_path / "a.parquet" / "part-0.parquet")
    assert bytes(listed(data)) == b"abc"


def test_a_megatron_index_without_its_tokens_names_them(tmp_path):
    (tmp_path / "a.idx").write_bytes(b"")
    with pytest.raises(InputError, match=r"no file or folder '.*a\.bin'"):
        load_tokens(Data(source=str(tmp_path / "a.idx")))


def test_data_sets_of_megatron_are_trained_on_as_they_are(tmp_path):
    from planning.workload.test_corpora import write_megatron

    write_megatron(tmp_path / "a", [[1, 2, 3], [4] * 300, [5, 6]])
    for name in ("a.bin", "a.idx"):
        found = load_tokens(Data(source=str(tmp_path / name), cache=str(tmp_path / "cache")))
        assert found.ends[0].tolist() == [3, 303, 305]
        assert found.vocab_size == 7
        assert found.shards[0][[0, 2, 3, 304]].tolist() == [1, 3, 4, 6]


def test_marks_beside_a_file_of_tokens_are_of_as_many(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4))
    np.save(tmp_path / "a.counted.npy", np.array([0, 1, 1, 0], np.uint8))
    found = load_tokens(Data(source=str(tmp_path / "a.npy"), cache=str(tmp_path / "cache")))
    assert (found.num_tokens, found.num_counted) == (4, 2)
    np.save(tmp_path / "a.counted.npy", np.array([0, 1], np.uint8))
    with pytest.raises(InputError, match=r"a\.counted\.npy: expected a number for each of 4 tokens"):
        load_tokens(Data(source=str(tmp_path), cache=str(tmp_path / "cache")))
