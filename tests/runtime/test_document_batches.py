"""Whole documents as batches: every token once an epoch, cut where they are too long, the same after every restart."""

import numpy as np
import pytest

from farpipe.errors import InputError
from farpipe.runtime.data import tokens
from farpipe.runtime.data.document_batches import DocumentBatches, load_document_batches
from farpipe.runtime.data.tokens import Tokens, load_tokens
from farpipe.spec import Data, Training
from small_models import LLAMA

MODEL = LLAMA.model_copy(update={"vocab_size": 256})


def batches(lengths, longest=8, global_batch=2, **options):
    text = np.arange(sum(lengths), dtype=np.uint16)
    return DocumentBatches(Tokens((text,), 1 << 16, ends=(np.cumsum(lengths),)), longest, global_batch, 3, **options)


def test_an_epoch_has_every_token_once_and_no_sequence_is_too_long():
    found = batches([5, 20, 0, 1, 8, 16], global_batch=4)
    assert found.num_sequences == 8
    assert found.longest_sequence == 8
    seen = [piece for step in range(2) for piece in found.batch(step)]
    assert [len(piece) for step in range(2) for piece in found.batch(step)] == [
        length for step in range(2) for length in found.lengths(step)
    ]
    assert sorted(token for piece in seen for token in piece.tolist()) == list(range(50))
    assert all((np.diff(piece) == 1).all() for piece in seen), "a sequence is of one document, in order"


def test_held_out_documents_are_never_trained_on_and_epochs_differ():
    found = batches([3] * 20, held_out=0.25, global_batch=5)
    epochs = [[piece[0].item() for step in steps for piece in found.batch(step)] for steps in ((0, 1, 2), (3, 4, 5))]
    assert len(set(epochs[0])) == 15
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]


def test_too_few_documents_for_a_step_are_told():
    with pytest.raises(InputError, match="2 sequences of up to 8 tokens, but one step takes 3"):
        batches([16], global_batch=3)
    with pytest.raises(InputError, match="0 sequences"):
        batches([0], global_batch=1)


@pytest.mark.parametrize("in_memory", [True, False])
def test_files_are_documents(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr(tokens, "IN_MEMORY_BYTES", 1 << 20 if in_memory else 1)
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in (("a", "one"), ("b", ""), ("c", "three and more"), ("d", "4")):
        (folder / f"{name}.txt").write_text(text)
    data = Data(source=str(folder), cache=str(tmp_path / "cache"))
    (ends,) = load_tokens(data).ends
    assert ends.tolist() == [5, 7, 23, 24]
    training = Training(sequence_length=10, global_batch=5)
    found = load_document_batches(data, MODEL, training)
    assert sorted(found.lengths(0)) == [1, 2, 5, 6, 10]
    texts = {bytes(piece.tolist()) for piece in found.batch(0)}
    assert texts == {b"one\n\n", b"\n\n", b"three and ", b"more\n\n", b"4"}


def test_arrays_of_tokens_say_beside_them_where_documents_end(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    np.save(tmp_path / "a.ends.npy", np.array([4, 10]))
    np.save(tmp_path / "b.npy", np.arange(3, dtype=np.uint16))
    data = Data(source=str(tmp_path), cache=str(tmp_path / "cache"))
    assert [ends.tolist() for ends in load_tokens(data).ends] == [[4, 10], [3]]
    for wrong in ([4, 9], [5, 4, 10], [[4, 10]], []):
        np.save(tmp_path / "a.ends.npy", np.array(wrong, np.int64))
        with pytest.raises(
            InputError, match=r"a\.ends\.npy: expected ascending numbers of tokens, the last of them 10"
        ):
            load_tokens(data)


def test_the_digest_tells_documents_apart():
    one = batches([5, 20, 4])
    assert one.digest == batches([5, 20, 4]).digest
    assert len({other.digest for other in (one, batches([6, 19, 4]), batches([5, 20, 4], longest=9))}) == 3
