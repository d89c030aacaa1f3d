"""Forks are what new processes are: a program can't tell, nor can who has started it."""

import json
import os
import signal
import subprocess
import sys

import pytest

from farpipe.engine.launch.run import run
from farpipe.engine.processes import Guarded, ParentPipe
from forked import start_new
from trainings import equal_states, losses, make_run, state

pytestmark = pytest.mark.slow  # starts processes

SEEN = """
import json, os, resource, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "words": [sys.argv, sys.path, __name__],
    "command line": open("/proc/self/cmdline").read().rstrip("\\0"),
    "shown environment": sorted(word for word in open("/proc/self/environ").read().split("\\0") if word),
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "descriptors": [number for number in range(1024) if os.path.exists(f"/proc/self/fd/{number}")],
    "streams": [(s.encoding, s.errors, s.isatty(), s.fileno()) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "handlers": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
    "signals": {key: status[key] for key in ("SigBlk", "SigIgn", "SigCgt", "Threads")},
    "limits": [resource.getrlimit(limit) for limit in range(16)],
    "group": [os.getpgid(0) == os.getsid(0) == os.getppid(), os.getpriority(os.PRIO_PROCESS, 0), os.umask(0)],
}))
"""
ENDS = {
    "well": ("pass", 0),
    "exit code": ("import sys; sys.exit(75)", 75),
    "words": ("import sys; sys.exit('no')", 1),
    "error": ("raise ValueError('no')", 1),
    "interrupted": ("raise KeyboardInterrupt", -signal.SIGINT),
    "killed": ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "asked to end": ("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM),
    "at exit": ("import atexit, os; atexit.register(lambda: print('left', flush=True))", 0),
    "thread": ("import threading, time; threading.Thread(target=lambda: [time.sleep(.1), print('left')]).start()", 0),
}


def printed(argv, tmp_path, *, new, **options):
    """The exit code of a program and what it prints, as a new process or a fork."""
    pipe, log = ParentPipe(), tmp_path / "log"
    try:
        with log.open("wb") as output:
            start = start_new.__get__(Guarded) if new else Guarded.start
            process = start(argv, pipe, stdout=output, stderr=output, **options)
        assert process.wait(60)
        return process.exit_code, log.read_text()
    finally:
        pipe.close()


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_program_sees_what_it_sees_in_a_new_process(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "folder").mkdir()
    words = {"-c": ["-c", SEEN], "-m": ["-m", "seen"], "script": [str(tmp_path / "seen.py")]}[kind]
    environment = os.environ | {"MARK": "ü", "PYTHONPATH": str(tmp_path / "folder"), "OMP_NUM_THREADS": "1"}
    given = os.memfd_create("given")
    try:
        code, new = printed([sys.executable, *words, "a", ""], tmp_path, new=True, env=environment, pass_fds=[given])
        fork = printed([sys.executable, *words, "a", ""], tmp_path, new=False, env=environment, pass_fds=[given])
    finally:
        os.close(given)
    assert code == fork[0] == 0, new + fork[1]
    assert json.loads(fork[1]) == json.loads(new)


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_a_new_process_does(end, tmp_path):
    text, code = ENDS[end]
    new = printed([sys.executable, "-c", text], tmp_path, new=True)
    fork = printed([sys.executable, "-c", text], tmp_path, new=False)
    assert new[0] == fork[0] == code
    assert new[1].splitlines()[-1:] == fork[1].splitlines()[-1:]


def test_a_program_answers_through_pipes():
    pipe, text = ParentPipe(), "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    process = Guarded.start([sys.executable, "-c", text], pipe, **streams)
    for question, answer in (("zürich\n", "ZÜRICH\n"), ("lugano\n", "LUGANO\n")):
        process.stdin.write(question)
        process.stdin.flush()
        assert process.stdout.readline() == answer
    process.stdin.close()
    assert process.wait(60)
    assert process.stdout.read() == ""
    process.stdout.close()
    pipe.close()


def test_torch_has_the_threads_that_the_environment_gives_it(tmp_path):
    text, environment = "import torch; print(torch.get_num_threads())", os.environ | {"OMP_NUM_THREADS": "3"}
    assert printed([sys.executable, "-c", text], tmp_path, new=False, env=environment) == (0, "3\n")


def test_a_training_is_that_of_new_processes_to_the_last_bit(text_file, tmp_path, request):
    spec = make_run(text_file, num_replicas=2)
    run(spec, tmp_path / "forks")
    request.getfixturevalue("new_processes")
    run(spec, tmp_path / "new")
    assert losses(tmp_path / "forks") == losses(tmp_path / "new")
    assert equal_states(state(tmp_path / "forks", spec), state(tmp_path / "new", spec))
