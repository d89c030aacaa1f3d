import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import Training, parse_job
from job_files import changed


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            'decay = "cosine"\nfinal_learning_rate = 1.0',
            r"training\.final_learning_rate: 1 is more than learning_rate 0\.0003",
        ),
        (
            'decay = "cosine"\nwarmup_steps = 10\ndecay_steps = 10',
            r"training\.decay_steps: 10 steps are over before warmup_steps 10",
        ),
        ('decay = "linear"', r"training\.decay: .*'none' or 'cosine'"),
        (
            "evaluate_every_steps = 10",
            r"training\.evaluate_every_steps: no text is held out for it; set data",
        ),
        ("checkpoint_every_minutes = -1", r"training\.checkpoint_every_minutes: must be at least 0"),
        ('zero = "2"', r"training\.zero: input should be 'auto' or 0, 1, 2 or 3, found '2'"),
        ('cuda_graphs = "all"', r"training\.cuda_graphs: input should be a valid boolean or 'part', found 'all'"),
        ("keep_checkpoints = 1.5", r"training\.keep_checkpoints: "),
        ("checkpoint_every = 10", r"training\.checkpoint_every: unknown key; did you mean 'checkpoint_every_"),
    ],
)
def test_what_can_not_be_is_told_with_its_place(lines, words):
    with pytest.raises(InputError, match=words):
        parse_job(with_training(lines))


def with_training(lines):
    """A job with further lines in [training]."""
    return changed(("global_batch = 256\n", f"global_batch = 256\n{lines}\n"))


def test_a_constant_rate_needs_no_end():
    job = parse_job(with_training("warmup_steps = 10\ndecay_steps = 3\nfinal_learning_rate = 1.0"))
    assert job.training.warmup_steps == 10


def test_no_clipping_survives_json():
    unclipped = Training(sequence_length=8, global_batch=2, clip_norm="none")
    assert unclipped.clip_norm is None
    assert Training.model_validate_json(unclipped.model_dump_json()) == unclipped
