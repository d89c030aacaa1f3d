"""Mutants of small valid files of every kind: whatever is in a file, a message and an exit code, never a traceback."""

import gc
import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from farpipe.cli import main
from mutations import SAMPLES, mutant, write_samples

SEEDS = 2
KEPT = {
    "megatron.sh": 1015,  # a sign that began no word was read for ever
    "tokens.ends.npy": 1006,  # a header that is no literal of Python
    "wandb.csv": 1007,  # a step of infinity
    "rates.log": 1017,  # a step of 400 digits
    "hugging/config.json": 1010,  # a table in place of the model's type
    "megatron-lm.log": 5008,  # a batch of 22 digits
    "bridge.yaml": 12,  # a list as long as a number of 20 digits
    "trace.json": 7,
}
"""Seeds that once ended in a traceback, or did not end."""
LIMIT_S = 120


def run(*arguments):
    """Exit code and all that the command printed."""
    before = sys.argv, gc.get_threshold()
    sys.argv = ["farpipe", *arguments]
    out = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = before[0]
        gc.set_threshold(*before[1])
    return end.value.code or 0, out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("mutants")
        patch.chdir(path)
        write_samples(path, run)
        yield path


@pytest.fixture
def _no_hang():
    def stop(*_):
        raise AssertionError(f"no answer after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_no_hang")
@pytest.mark.parametrize("name", SAMPLES)
def test_a_mutant_of_a_file_is_read_or_refused(name, folder):
    path = folder / name
    whole = path.read_bytes()
    command = [word.format(name) for word in SAMPLES[name][0]]
    for seed in (*range(SEEDS), *([KEPT[name]] if name in KEPT else ())):
        path.write_bytes(mutant(name, whole, seed))
        try:
            code, text = run(*command)
        finally:
            path.write_bytes(whole)
        assert code in (0, 2, 3, 4, 5), f"{' '.join(command)}, seed {seed}: {text[-2000:]}"
