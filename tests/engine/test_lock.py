"""Only one run at a time works in a directory."""

import subprocess
import sys

import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.engine.lock import only_run

HOLD = """
import sys
from pathlib import Path
from farpipe.engine.lock import only_run
with only_run(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_has_ended_even_by_kill_9(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(InputError, match="another run is at work in it"), only_run(tmp_path):
            pass
        other.kill()
    with only_run(tmp_path):
        pass


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RunError, match="gone: can't be written to: No such file"), only_run(tmp_path / "gone"):
        pass
