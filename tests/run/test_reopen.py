"""Before a run goes on in its directory: what can be compared is, and nothing is touched if it can't go on."""

import pytest

from farpipe.errors import InputError
from farpipe.run.run import run
from trainings import make_run, train


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": "cat"}, "the training text is no longer the same"),
        ({"seed": 8}, "is of a training with another seed"),
        ({"num_steps": 2}, "the checkpoint after 3 steps has all 2 steps of this run; ask for more with --steps"),
    ],
)
def test_a_run_that_can_not_go_on_is_left_as_it_is(change, words, tmp_path):
    run_dir, text_file, change = tmp_path / "run", tmp_path / "text.txt", dict(change)
    text_file.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    first = make_run(text_file, num_steps=3)
    train(first, run_dir)
    first.save(run_dir / "run.json")
    (run_dir / "summary.json").unlink()
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    text_file.write_text(text_file.read_text().replace("fox", change.pop("text", "fox")))
    with pytest.raises(InputError, match=words):
        run(make_run(text_file, **({"num_steps": 6} | change)), run_dir, resume=True)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
