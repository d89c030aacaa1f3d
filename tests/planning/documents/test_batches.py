from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.core.spec import Data, Training
from farpipe.engine.data.batches import IGNORED, Batch, Batches
from farpipe.planning.documents import tokens
from farpipe.planning.documents.batches import DocumentBatches, Permutation, Share, load_document_batches
from farpipe.planning.documents.tokens import Tokens, load_tokens, require_vocabulary
from small_models import LLAMA

TEXT = Tokens((np.frombuffer(bytes(range(256)) * 4, np.uint8),), 256)
SHAPE = (3, 2, 16)
MODEL = LLAMA.model_copy(update={"vocab_size": 256})


def numbered(*sizes):
    """Shards of numbers that count on from one to the next, so that a token tells where it stood."""
    ends = np.cumsum([0, *sizes])
    return Tokens(tuple(np.arange(a, b, dtype=np.uint32) for a, b in pairwise(ends)), int(ends[-1]))


def firsts(batch):
    """The first token of every sequence."""
    return batch.tokens[..., 0].flatten().tolist()


def test_batches_are_sequences_of_the_text_with_the_next_token_as_target():
    batch = Batches(TEXT, SHAPE, seed=1).batch(0)
    assert batch.tokens.shape == batch.targets.shape == SHAPE
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.tokens[..., 1:], batch.targets[..., :-1])
    assert torch.equal((batch.tokens + 1) % 256, batch.targets)
    assert batch.num_target_tokens == 3 * 2 * 16


def test_a_batch_depends_on_seed_and_step_alone():
    def tokens(seed, step):
        return Batches(TEXT, SHAPE, seed).batch(step).tokens

    assert torch.equal(tokens(1, 5), tokens(1, 5))
    assert not torch.equal(tokens(1, 5), tokens(1, 6))
    assert not torch.equal(tokens(1, 5), tokens(2, 5))


def test_resuming_at_a_step_goes_on_where_the_run_was():
    straight = Batches(TEXT, SHAPE, seed=3)
    whole = [straight.batch(step) for step in range(25)]
    resumed = Batches(TEXT, SHAPE, seed=3)
    assert all(torch.equal(resumed.batch(step).tokens, whole[step].tokens) for step in range(20, 25))


def test_every_epoch_sees_every_sequence_once_in_an_order_of_its_own():
    batches = Batches(numbered(6 * 16 * 5 + 1), SHAPE, seed=0)
    assert batches.num_sequences == 30
    epochs = [[first for step in range(5) for first in firsts(batches.batch(5 * e + step))] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == [16 * sequence for sequence in range(30)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != sorted(epochs[0])


def test_an_epoch_may_end_within_a_batch():
    batches = Batches(numbered(7 * 16 + 1), SHAPE, seed=0)
    seen = [first for step in range(7) for first in firsts(batches.batch(step))]
    assert all(seen.count(16 * sequence) == 6 for sequence in range(7)), "42 places in 6 epochs of 7"


def test_sequences_do_not_go_over_the_end_of_a_shard():
    batches = Batches(numbered(50, 10, 65), SHAPE, seed=0)
    seen = {first for step in range(7) for first in firsts(batches.batch(step))}
    assert seen == {0, 16, 32, 60, 76, 92, 108}


def of_replicas(num_replicas, tokens=TEXT, shape=(6, 2, 16), **options):
    """The batches of every replica."""
    return [Batches(tokens, shape, 5, share=Share(i, num_replicas), **options) for i in range(num_replicas)]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_replicas_share_the_batch_of_one(num_replicas):
    (one,) = of_replicas(1, held_out=0.2)
    replicas = of_replicas(num_replicas, held_out=0.2)
    assert {batches.digest for batches in replicas} == {one.digest}
    pairs = [(one.batch(step), [batches.batch(step) for batches in replicas]) for step in range(20)]
    pairs += [(one.held_out_batch(index), [batches.held_out_batch(index) for batches in replicas]) for index in (0, 1)]
    for whole, shares in pairs:
        assert {tuple(share.tokens.shape) for share in shares} == {(6 // num_replicas, 2, 16)}
        assert torch.equal(torch.cat([share.tokens for share in shares]), whole.tokens)
        assert torch.equal(torch.cat([share.targets for share in shares]), whole.targets)
        counted = int((whole.targets != IGNORED).sum())
        assert {share.num_target_tokens for share in shares} == {counted}, "the loss is divided by the whole step's"
    assert counted == 1 * 16, "of 13 sequences that are held out"


class Watched:
    """An array that notes where it is read."""

    def __init__(self, array):
        self.array, self.size, self.starts = array, array.size, []

    def __getitem__(self, place):
        self.starts.append(place.start)
        return self.array[place]


def test_a_replica_reads_its_own_sequences_only():
    text = Watched(np.arange(30 * 16 + 1, dtype=np.uint32))
    replicas = of_replicas(3, Tokens((text,), 1000))
    read = []
    for batches in replicas:
        found = [first for step in range(2) for first in firsts(batches.batch(step))]
        assert text.starts == found
        assert len(found) == 2 * 12 // 3
        read += found
        text.starts.clear()
    assert len(read) == len(set(read)), "nothing is read twice in an epoch"


def test_what_is_held_out_is_never_trained_on_and_evaluated_once():
    batches = Batches(numbered(100 * 16 + 1), SHAPE, seed=1, held_out=0.095)
    assert (batches.num_held_out, batches.num_sequences, batches.num_held_out_batches) == (10, 90, 2)
    trained = {first for step in range(45) for first in firsts(batches.batch(step))}
    kept = [batches.held_out_batch(index) for index in range(2)]
    counted = [b.tokens[..., 0][b.targets[..., 0] != IGNORED].tolist() for b in kept]
    evaluated = counted[0] + counted[1]
    assert len(trained) == 90
    assert len(evaluated) == len(set(evaluated)) == 10
    assert not trained & set(evaluated)
    assert kept[1].num_target_tokens == 4 * 16
    with pytest.raises(InputError, match=r"10 sequences are held out, which is 2 batches of 6"):
        batches.held_out_batch(2)
    assert max(evaluated) - min(evaluated) > 800, "they are spread over the text"
    others = Batches(numbered(100 * 16 + 1), SHAPE, seed=2, held_out=0.095)
    assert torch.equal(others.held_out_batch(0).tokens, kept[0].tokens), "the seed does not change what is held out"


def test_ignored_targets_do_not_count():
    targets = torch.tensor([[[1, IGNORED], [IGNORED, IGNORED]]])
    assert Batch(targets, targets).num_target_tokens == 1


def zeros(num):
    return Tokens((np.zeros(num, np.uint8),), 1)


def test_too_little_text_says_how_much_is_needed():
    with pytest.raises(InputError, match=r"96 tokens, but one step of 6 sequences x 16 tokens needs 97"):
        Batches(zeros(96), SHAPE, seed=0)
    with pytest.raises(InputError, match=r"one step of 12 sequences .* beside 4 that are held out"):
        Batches(zeros(200), (6, 2, 16), 0, held_out=0.3)
    with pytest.raises(InputError, match="has 0 tokens"):
        Batches(zeros(0), SHAPE, 0)


def test_the_digest_tells_texts_and_seeds_apart():
    changed = TEXT.shards[0].copy()
    changed[500] += 1
    variants = [
        Batches(TEXT, SHAPE, 1),
        Batches(Tokens((changed,), 256), SHAPE, 1),
        Batches(TEXT, SHAPE, 2),
        Batches(TEXT, SHAPE, 1, held_out=0.1),
        Batches(TEXT, (3, 3, 16), 1),
        Batches(TEXT, (3, 2, 15), 1),
    ]
    assert len({batches.digest for batches in variants}) == len(variants)
    assert Batches(TEXT, (2, 3, 16), 1).digest == variants[0].digest, "the same sequences in other microbatches"
    assert Batches(Tokens((TEXT.shards[0].copy(),), 256), SHAPE, 1).digest == variants[0].digest


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(InputError, match=r"model\.vocab_size: .* 256 different tokens, the model 32"):
        require_vocabulary(TEXT, LLAMA)
    with pytest.raises(InputError, match=r"model\.vocab_size: .* 33 different tokens, the model 32"):
        require_vocabulary(numbered(33), LLAMA)
    require_vocabulary(numbered(32), LLAMA)


@given(st.integers(1, 3000), st.integers(0, 5))
def test_every_number_comes_exactly_once(size, key):
    found = Permutation(size, key)(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


def test_it_depends_on_its_key_alone():
    places = np.arange(1000)
    assert (Permutation(1000, 1, 2)(places) == Permutation(1000, 1, 2)(places)).all()
    assert (Permutation(1000, 1, 2)(places) != Permutation(1000, 1, 3)(places)).any()
    assert (Permutation(1000, 1, 2)(places)[10:20] == Permutation(1000, 1, 2)(places[10:20])).all()


@pytest.mark.parametrize("size", [1000, 1024, 10**15])
def test_it_looks_shuffled(size):
    found = Permutation(size, 7)(np.arange(1000)) / size
    assert abs(found.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.1
    assert abs(np.corrcoef(found, np.arange(1000))[0, 1]) < 0.1


def batches(lengths, longest=8, global_batch=2, **options):
    text = np.arange(sum(lengths), dtype=np.uint16)
    return DocumentBatches(Tokens((text,), 1 << 16, ends=(np.cumsum(lengths),)), longest, global_batch, 3, **options)


def test_an_epoch_has_every_token_once_and_no_sequence_is_too_long():
    found = batches([5, 20, 0, 1, 8, 16], global_batch=4)
    assert found.num_sequences == 8
    assert found.longest_sequence == 8
    seen = [piece for step in range(2) for piece in found.batch(step).tokens]
    assert [len(piece) for step in range(2) for piece in found.batch(step).tokens] == [
        length for step in range(2) for length in found.lengths(step)
    ]
    assert sorted(token for piece in seen for token in piece.tolist()) == list(range(50))
    assert all((np.diff(piece) == 1).all() for piece in seen), "a sequence is of one document, in order"


def test_held_out_documents_are_never_trained_on_and_epochs_differ():
    found = batches([3] * 20, held_out=0.25, global_batch=5)
    epochs = [
        [piece[0].item() for step in steps for piece in found.batch(step).tokens] for steps in ((0, 1, 2), (3, 4, 5))
    ]
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
    texts = {bytes(piece.tolist()) for piece in found.batch(0).tokens}
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


def test_targets_that_are_only_read_do_not_count_in_any_replica():
    text = np.arange(40, dtype=np.uint16)
    marks = (text % 4 != 0).astype(np.uint8)
    whole = Batches(Tokens((text,), 40, counted=(marks,)), (2, 1, 8), seed=0)
    shares = [Batches(whole.tokens, (2, 1, 8), seed=0, share=Share(replica, 2)).batch(0) for replica in (0, 1)]
    batch = whole.batch(0)
    assert (batch.targets == IGNORED).tolist() == (((batch.tokens + 1) % 4) == 0).tolist()
    assert batch.num_target_tokens == 12
    assert [share.num_target_tokens for share in shares] == [12, 12]
    assert sum(int((share.targets != IGNORED).sum()) for share in shares) == 12
    assert whole.digest != Batches(Tokens((text,), 40), (2, 1, 8), seed=0).digest


def test_sequences_of_documents_have_their_marks():
    text = np.arange(40, dtype=np.uint16)
    marks = (text >= 20).astype(np.uint8)
    tokens = Tokens((text,), 40, ends=(np.array([15, 40]),), counted=(marks,))
    found = DocumentBatches(tokens, 8, 3, seed=1, held_out=0.2)
    for rows, counted in (found.batch(0), found.held_out_batch(0)):
        assert [(row >= 20).tolist() for row in rows] == [each.tolist() for each in counted]
    assert DocumentBatches(Tokens((text,), 40, ends=tokens.ends), 8, 3, seed=1).batch(0).counted is None
