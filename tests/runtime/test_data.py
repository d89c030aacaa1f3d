from itertools import pairwise

import numpy as np
import pytest
import torch

from farpipe.errors import InputError
from farpipe.runtime.data.batches import IGNORED, Batch, Batches, Share, require_vocabulary
from farpipe.runtime.data.tokens import Tokens
from small_models import LLAMA

TEXT = Tokens((np.frombuffer(bytes(range(256)) * 4, np.uint8),), 256)
SHAPE = (3, 2, 16)


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
