import numpy as np
import pytest
import torch

from farpipe.errors import InputError
from farpipe.runtime.data import IGNORED, Batch, Batches, load_text, require_vocabulary
from farpipe.spec import Data
from small_models import LLAMA

TEXT = np.frombuffer(bytes(range(256)) * 4, np.uint8)
SHAPE = (3, 2, 16)


def test_batches_are_windows_of_the_text_with_the_next_byte_as_target():
    batch = Batches(TEXT, SHAPE, seed=1).batch(0)
    assert batch.tokens.shape == batch.targets.shape == SHAPE
    assert torch.equal(batch.tokens[..., 1:], batch.targets[..., :-1])
    assert torch.equal((batch.tokens + 1) % 256, batch.targets)
    assert batch.num_target_tokens == 3 * 2 * 16


def test_a_batch_depends_on_seed_and_step_alone():
    def tokens(seed, step):
        return Batches(TEXT, SHAPE, seed).batch(step).tokens

    assert torch.equal(tokens(1, 5), tokens(1, 5))
    assert not torch.equal(tokens(1, 5), tokens(1, 6))
    assert not torch.equal(tokens(1, 5), tokens(2, 5))


def test_ignored_targets_do_not_count():
    targets = torch.tensor([[[1, IGNORED], [IGNORED, IGNORED]]])
    assert Batch(targets, targets).num_target_tokens == 1


def test_every_byte_of_the_text_can_be_seen():
    text = np.arange(98, dtype=np.uint8)
    batches = Batches(text, SHAPE, seed=0)
    seen = {int(token) for step in range(50) for token in batches.batch(step).targets.flatten()}
    assert seen == set(range(1, 98))


def test_too_little_text_says_how_much_is_needed():
    with pytest.raises(
        InputError, match=r"96 bytes, but one step of 3 microbatches x 2 sequences x 16 tokens needs 97"
    ):
        Batches(np.zeros(96, np.uint8), SHAPE, seed=0)


def test_the_digest_tells_texts_and_seeds_apart():
    changed = TEXT.copy()
    changed[500] += 1
    variants = [
        Batches(TEXT, SHAPE, 1),
        Batches(changed, SHAPE, 1),
        Batches(TEXT, SHAPE, 2),
        Batches(TEXT, (2, 3, 16), 1),
    ]
    assert len({batches.digest for batches in variants}) == 4
    assert Batches(TEXT.copy(), SHAPE, 1).digest == variants[0].digest


def test_the_standard_library_is_real_text_and_large_enough_for_a_demo():
    text = load_text(Data(source="stdlib"))
    assert text.size > 1_000_000
    assert b"import collections" in text.tobytes()


def test_a_folder_is_read_in_order_of_names_without_hidden_files(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("first")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\xff\xfe")
    assert load_text(Data(source=str(tmp_path))).tobytes() == b"first\n\nsecond"


def test_what_can_not_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no file or folder '.*nothing'; \"stdlib\" is always there"):
        load_text(Data(source=str(tmp_path / "nothing")))
    with pytest.raises(InputError, match="has no files in it"):
        load_text(Data(source=str(tmp_path)))
    (tmp_path / "image.png").write_bytes(b"ab\xff\xd8")
    with pytest.raises(InputError, match=r"image\.png: not UTF-8 text \(byte 2\)"):
        load_text(Data(source=str(tmp_path)))


def test_a_vocabulary_smaller_than_a_byte_is_refused():
    with pytest.raises(InputError, match=r"model\.vocab_size: .* 256 different tokens, the model only 32"):
        require_vocabulary(LLAMA)
