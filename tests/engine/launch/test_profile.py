import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.core.spec import Model, Training
from farpipe.engine.launch.profile import StackTimes, part_times, profile
from farpipe.planning.cost import busy_notes
from farpipe.planning.cost.profile import PartTimes, Profile

TRAINING = Training(sequence_length=32, global_batch=2, microbatch_size=2, precision="fp32")


def model(hidden):
    return Model(num_layers=12, hidden=hidden, num_heads=4, ffn_hidden=2 * hidden, vocab_size=256)


def stack_times(num_layers=0, embedding=0, head=0, fixed=0.5):
    """Times of a stack whose layer takes 2, 3 and 1 s, its embedding 0.25 of that and its head 4 times."""
    factor = num_layers + 0.25 * embedding + 4 * head
    return {"forward_s": 2 * factor + fixed, "input_grad_s": 3 * factor + fixed, "weight_grad_s": factor}


def test_the_times_of_the_parts_are_differences_of_stacks():
    stacks = StackTimes(
        one_layer=stack_times(1),
        three_layers=stack_times(3),
        embedding_and_layer=stack_times(1, embedding=1),
        layer_and_head=stack_times(1, head=1),
        optimizer_s_per_param=1e-9,
        cpu_share=1.0,
    )
    slow = stacks.model_copy(update={"one_layer": stack_times(9), "three_layers": stack_times(27)})
    assert part_times([stacks, slow, stacks]) == {
        "embedding": PartTimes(forward_s=0.5, input_grad_s=0.75, weight_grad_s=0.25),
        "layer": PartTimes(forward_s=2, input_grad_s=3, weight_grad_s=1),
        "head": PartTimes(forward_s=8, input_grad_s=12, weight_grad_s=4),
        "action_overhead_s": 0.5,
        "at_most": (),
    }


def stacks(**noise):
    """Stacks of which those in `noise` come out shorter or longer by a factor."""
    times = {
        "one_layer": stack_times(1),
        "three_layers": stack_times(3),
        "embedding_and_layer": stack_times(1, embedding=1),
        "layer_and_head": stack_times(1, head=1),
    }
    for name, factor in noise.items():
        times[name] = {kind: seconds * factor for kind, seconds in times[name].items()}
    return StackTimes(**times, optimizer_s_per_param=1e-9, cpu_share=1.0)


HIDDEN = [("three_layers", "layer"), ("embedding_and_layer", "embedding"), ("layer_and_head", "head")]


@pytest.mark.parametrize(("stack", "part"), HIDDEN)
def test_what_noise_hides_is_named_and_neither_zero_nor_negative(stack, part):
    found = part_times([stacks(**{stack: 0.1})])
    assert {name.partition(".")[0] for name in found["at_most"]} == {part}
    assert all(seconds > 0 for seconds in found[part].model_dump().values())


@pytest.mark.parametrize(("stack", "part"), HIDDEN)
def test_what_noise_hides_is_measured_again_and_a_layer_of_no_time_is_refused(monkeypatch, stack, part):
    asked = []

    def measured(noise):
        def measure(request, num_processes):
            asked.append(request.seconds)
            return [(stacks(**{stack: 0.1}) if noise else stacks()).model_dump()]

        return measure

    monkeypatch.setattr("farpipe.engine.launch.profile.measure", measured(noise=False))
    assert profile(model(32), TRAINING, "here", seconds=3.0).at_most == ()
    assert asked == [3.0]
    monkeypatch.setattr("farpipe.engine.launch.profile.measure", measured(noise=True))
    if part == "embedding":
        found = profile(model(32), TRAINING, "here", seconds=3.0)
        assert "embedding.forward_s" in "".join(busy_notes([found]))
        assert Profile.from_json(found.to_json()) == found
    else:
        with pytest.raises(RunError, match=rf"nothing was written: {part}\.forward_s.* came out as 0 s or less"):
            profile(model(32), TRAINING, "here", seconds=3.0)
    assert asked[1:] == [3.0, 6.0]


@pytest.mark.slow
def test_a_profile_is_measured_by_several_processes_at_once(tmp_path):
    try:
        wide = profile(model(512), TRAINING, "this machine", num_processes=2, seconds=0.5)
        narrow = profile(model(32), TRAINING, "this machine", num_processes=2, seconds=0.5)
    except RunError as error:
        pytest.skip(f"nothing follows from a machine this busy: {error}")
    assert wide.device == "this machine"
    assert wide.microbatch_size == 2
    assert 0 < wide.optimizer_s_per_param < 1e-6
    wide.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == wide
    if (share := min(wide.cpu_share, narrow.cpu_share)) < 0.7:
        pytest.skip(f"the processes had the CPU for {share:.0%} of the time: nothing follows from what they measured")
    for kind in ("forward_s", "input_grad_s", "weight_grad_s"):
        assert getattr(wide.layer, kind) > getattr(narrow.layer, kind)
    assert wide.layer.forward_s > 3 * narrow.layer.forward_s


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.nightly  # four minutes in which nothing else gets a core
def test_a_profile_beside_other_work_says_so_or_is_refused_and_is_measured_for_longer():
    with ExitStack() as stack:
        for _ in range(3 * len(os.sched_getaffinity(0))):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        begin_s = time.monotonic()
        # So wide that an action takes longer than a turn of the system's scheduler: none is left alone.
        try:
            said = "".join(busy_notes([profile(model(768), TRAINING, "this machine", seconds=1.0)]))
        except RunError as error:  # it hid the head, twice
            said = str(error)
        assert time.monotonic() - begin_s > 3.0
    assert "had the CPU for" in said or "other work on this machine hides it" in said


@pytest.mark.slow
def test_a_precision_that_does_not_train_is_said_and_nothing_is_left(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InputError, match="'fp16' needs loss scaling"):
        profile(model(32), TRAINING.model_copy(update={"precision": "fp16"}), "this machine", seconds=0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_profile_that_was_measured_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with suppress(RunError):  # other work may hide a model as small as this one
        profile(model(32), TRAINING, "this machine", seconds=0.1)
    assert list(tmp_path.iterdir()) == []
