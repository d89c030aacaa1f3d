"""Changes that people make to a run directory: refused before anything in it is changed."""

import pytest

from farpipe.core.errors import InputError
from farpipe.engine.launch.directory import reopen
from farpipe.engine.launch.run import run
from farpipe.engine.lock import only_run
from small_models import LLAMA
from trainings import make_run, train

pytestmark = pytest.mark.slow  # starts processes


@pytest.fixture
def done(text_file, tmp_path):
    """A run of two steps, and everything in its directory."""
    run_dir = tmp_path / "run"
    train(make_run(text_file, num_steps=2), run_dir)
    return run_dir, contents(run_dir)


def contents(run_dir):
    return {path.relative_to(run_dir): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_going_on_with_another_model_is_refused_and_leaves_the_run_as_it_is(done, text_file):
    run_dir, before = done
    with pytest.raises(InputError, match=r"step-2: is of a training with another model"):
        reopen(make_run(text_file, model=LLAMA, num_steps=4), run_dir)
    assert contents(run_dir) == before


def test_going_on_with_a_run_that_is_at_work_is_refused_and_leaves_it_as_it_is(done, text_file):
    run_dir, before = done
    with only_run(run_dir):
        with pytest.raises(InputError, match="another run is at work in it"):
            run(make_run(text_file, num_steps=4), run_dir, resume=True)
        assert contents(run_dir) == before


def test_two_runs_that_begin_in_one_directory_do_not_both_work_there(text_file, tmp_path):
    with only_run(tmp_path), pytest.raises(InputError, match="another run is at work in it"):
        train(make_run(text_file, num_steps=2), tmp_path)


def test_with_every_checkpoint_damaged_going_on_is_refused_and_leaves_the_run_as_it_is(done, text_file):
    run_dir, before = done
    manifest = run_dir / "checkpoints" / "step-2" / "manifest.json"
    manifest.write_text("{")
    with pytest.raises(InputError, match=r"step-2/manifest.json: not JSON.*\n.*nothing was changed"):
        reopen(make_run(text_file, num_steps=4), run_dir)
    assert contents(run_dir) == before | {manifest.relative_to(run_dir): b"{"}
