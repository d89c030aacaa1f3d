"""Steps without a barrier give what steps with one give, to the last bit."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import DivergedError, RunError, RunStoppedError
from farpipe.engine.executor import free_steps
from farpipe.engine.executor.free_steps import FreeSteps
from farpipe.engine.executor.work import AGAIN, Trainer
from small_models import LLAMA, TIED
from trainings import checkpoints, equal_states, losses, make_run, metrics, state, train

pytestmark = pytest.mark.slow

NO_CAUTION = 1e9
"""Speculate however near the limit the last norm was."""


@pytest.fixture
def again(monkeypatch):
    """Steps that rank 0 has run again, with whatever caution is set before."""
    found = []
    run = FreeSteps.run

    def counted(self, step, *args, **options):
        before = self.num_again
        answer = run(self, step, *args, **options)
        if self.num_again > before and self._peers.rank == 0:
            found.append(step)
        return answer

    monkeypatch.setattr(FreeSteps, "run", counted)
    monkeypatch.setattr(FreeSteps.__init__, "__defaults__", (NO_CAUTION,))
    return found


def both(text_file, folder, **options):
    """The run with a barrier and the same without."""
    runs = [make_run(text_file, **options | {"barrier": barrier}) for barrier in (True, False)]
    for run, name in zip(runs, ("barrier", "free"), strict=True):
        train(run, folder / name)
    return runs


def expect_equal(runs, folder, step=None):
    assert losses(folder / "free") == losses(folder / "barrier")
    assert checkpoints(folder / "free") == checkpoints(folder / "barrier")
    one, other = (state(folder / name, run, step) for run, name in zip(runs, ("barrier", "free"), strict=True))
    assert equal_states(one, other)


def median_norm(text_file, folder, **options):
    run = make_run(text_file, **options)
    train(run, folder)
    norms = sorted(line["grad_norm"] for line in metrics(folder))
    return norms[len(norms) // 2]


CASES = {
    "plain": {"model": LLAMA},
    "tied": {"model": TIED},
    "four ranks": {"model": LLAMA, "placement": (0, 1, 2, 3), "method": "zb-2p"},
    "interleaved": {"model": LLAMA, "placement": (0, 1, 0, 1), "method": "interleaved"},
    "replicas": {"model": LLAMA, "num_replicas": 2, "zero": 0},
    "zero": {"model": TIED, "num_replicas": 2, "zero": 1},
    "bf16": {"model": LLAMA, "precision": "bf16"},
}


@pytest.mark.parametrize("clip", ["none", "seldom", "often", "always"])
@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_weights_are_equal_to_the_bit(case, clip, text_file, tmp_path, again):
    options = {"num_steps": 8, "weight_decay": 0.5} | CASES[case]
    limit = None if clip == "none" else 1e-3
    if clip in ("seldom", "often"):
        limit = median_norm(text_file, tmp_path / "norms", clip_norm=None, **options) * (1.2 if clip == "seldom" else 1)
    runs = both(text_file, tmp_path, clip_norm=limit, **options)
    expect_equal(runs, tmp_path)
    assert (clip == "none") <= (not again)
    if clip in ("often", "always"):
        assert again, "a rollback is what is tested"


def test_a_limit_that_is_always_met_is_waited_for(text_file, tmp_path, again, monkeypatch):
    monkeypatch.setattr(FreeSteps.__init__, "__defaults__", (free_steps.CAUTION,))
    runs = both(text_file, tmp_path, clip_norm=1e-3, num_steps=8)
    expect_equal(runs, tmp_path)
    assert not again


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_any_order_limit_and_interval_is_equal(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("free")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    options = {
        "model": data.draw(st.sampled_from([LLAMA, TIED])),
        "method": data.draw(st.sampled_from(["gpipe", "1f1b", "eager", "zb-h1", "zb-2p"])),
        "placement": data.draw(st.sampled_from([(0, 1), (0, 1, 2, 3)])),
        "num_steps": data.draw(st.integers(1, 7)),
        "clip_norm": data.draw(st.sampled_from([None, 0.5, 1.0, 1.5, 2.0])),
        "checkpoint_every_steps": data.draw(st.integers(0, 3)),
        "evaluate_every_steps": data.draw(st.integers(0, 3)),
        "learning_rate": data.draw(st.sampled_from([1e-2, 1e-1])),
        "keep_checkpoints": 9,
    }
    defaults, FreeSteps.__init__.__defaults__ = (
        FreeSteps.__init__.__defaults__,
        (data.draw(st.sampled_from([0.7, 1e9])),),
    )
    try:
        runs = both(text, folder, **options)
    finally:
        FreeSteps.__init__.__defaults__ = defaults
    for step in checkpoints(folder / "free"):
        expect_equal(runs, folder, step)
    evaluations = [[line["evaluation_loss"] for line in metrics(folder / name)] for name in ("free", "barrier")]
    assert evaluations[0] == evaluations[1]


def test_a_request_to_stop_leaves_a_checkpoint_from_which_the_run_goes_on(text_file, tmp_path, again):
    options = {"num_steps": 9, "clip_norm": 1.0, "keep_checkpoints": 9}
    runs = both(text_file, tmp_path, **options)
    asked, stopped = threading.Event(), tmp_path / "stopped"
    begin = Trainer.begin_step

    def ask_in_step_3(self, step):
        if step == 3:
            asked.set()
        begin(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "begin_step", ask_in_step_3)
        with pytest.raises(RunStoppedError, match="stopped by"):
            train(runs[1], stopped, stop=asked.is_set)
    assert checkpoints(stopped)[0] in (4, 5), "asked for in step 2 or 3, it acts a step later"
    asked.clear()
    train(runs[1], stopped)
    assert losses(stopped) == losses(tmp_path / "barrier")
    assert equal_states(state(stopped, runs[1], 9), state(tmp_path / "barrier", runs[0], 9))


def test_divergence_is_found_before_any_later_checkpoint(text_file, tmp_path):
    options = {"learning_rate": 1e30, "clip_norm": None, "num_steps": 9, "checkpoint_every_steps": 1}
    for barrier, name in ((True, "barrier"), (False, "free")):
        with pytest.raises(DivergedError, match="step"):
            train(make_run(text_file, barrier=barrier, **options), tmp_path / name)
    assert checkpoints(tmp_path / "free") == checkpoints(tmp_path / "barrier")
    assert losses(tmp_path / "free") == losses(tmp_path / "barrier")


def test_a_rank_that_is_lost_leaves_a_checkpoint_of_one_step_on_all(text_file, tmp_path, again):
    options = {"num_steps": 9, "clip_norm": 1.0, "checkpoint_every_steps": 2, "keep_checkpoints": 9}
    runs = both(text_file, tmp_path, **options)
    lost, begin = tmp_path / "lost", Trainer.begin_step

    def die_in_step_6(self, step):
        if step % AGAIN == 6 and self._peers.rank == 1:
            raise RunError("the machine is gone")
        begin(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "begin_step", die_in_step_6)
        with pytest.raises(RunError):
            train(runs[1], lost)
    assert checkpoints(lost)[0] in (4, 6)
    train(runs[1], lost)
    found = {step: figures for step, *figures in losses(lost)}
    assert found == {step: figures for step, *figures in losses(tmp_path / "barrier")}
    assert equal_states(state(lost, runs[1], 9), state(tmp_path / "barrier", runs[0], 9))
