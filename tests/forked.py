"""Python programs as forks of one process that has torch imported: a run of two ranks takes 2 s of CPU, not 12.

A fork gets what a new interpreter would have: command line (also for ``ps``), environment, descriptors, session,
signals, threads of torch, exit code; and the guard before it. It shares the hash of strings with all other forks, so
some runs of the tests start new interpreters nevertheless: see `new_processes` in conftest.py. Programs that tests
start by themselves are new; what these start are forks where they are run by with_forks.py.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from farpipe.engine.processes import Guarded, guard

ROOM = 65536
"""Bytes that the server's command line and environment leave for those of its forks."""
REAP_S = 0.2
"""Time between looks for the end of forks whose starter is gone."""
OWN_DESCRIPTORS = range(1000)
"""Descriptors that a program may ask for; those above serve to sort them."""
PLACE = "TEST_FORKS"
"""Variable of the environment that names the server's socket."""
WITH_FORKS = str(Path(__file__).with_name("with_forks.py"))
CLONE_NEWNET = 0x40000000
"""Kind of namespace, see setns(2)."""
start_new = Guarded.start.__func__


class Server:
    """The process to fork from; whoever needs it before it has loaded all waits."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.place = str(Path(self._folder.name) / "socket")
        with _socket() as listening:
            listening.bind(self.place)
            listening.listen()
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno()), " " * ROOM],
                env=os.environ | {"OMP_NUM_THREADS": "1", "ROOM": " " * ROOM},
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self):
        """End the server."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _socket():
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Forks:
    """Starts forks of the server at a place, for one process."""

    def __init__(self, place):
        self._lock, self._socket = threading.Lock(), _socket()
        self._socket.connect(place)

    def ask(self, request, descriptors=()):
        """The answer to a request, a number."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return int(self._socket.recv(64))

    def close(self):
        """Let go of the server, which then reaps what is left."""
        self._socket.close()

    def start(self, kind, argv, parent_pipe, *, env=None, pass_fds=(), encoding=None, **streams):
        """As `Guarded.start`, by a fork where `argv` is a Python program without options of the interpreter."""
        program = inside(argv)[1]
        if program[0] != sys.executable or (program[1].startswith("-") and program[1] not in ("-m", "-c")):
            return start_new(kind, argv, parent_pipe, env=env, pass_fds=pass_fds, encoding=encoding, **streams)
        with contextlib.ExitStack() as stack:
            ours, theirs = _streams(stack, encoding, **streams)
            theirs |= {number: number for number in (parent_pipe.fileno, *pass_fds)}
            words = [guard.__file__, str(parent_pipe.fileno), *argv]
            environment = {**(os.environ if env is None else env)}
            request = {"argv": words, "env": environment, "cwd": str(Path.cwd()), "descriptors": [*theirs]}
            return kind(Fork(self, self.ask(request, [*theirs.values()]), *ours))


def _streams(stack, encoding, stdin=subprocess.DEVNULL, stdout=None, stderr=None):
    """Our ends of the pipes to a program, stdin and stdout, and its descriptors 0 to 2."""
    ours, theirs = [None, None], {}
    for number, stream in enumerate((stdin, stdout, stderr)):
        if stream == subprocess.PIPE:
            reading, writing = os.pipe()
            theirs[number], own = (reading, writing) if number == 0 else (writing, reading)
            stack.callback(os.close, theirs[number])
            ours[number] = open(own, "rw"[number == 0] + ("" if encoding else "b"), encoding=encoding)  # noqa: PTH123, SIM115
        elif stream == subprocess.DEVNULL:
            theirs[number] = os.open(os.devnull, os.O_RDWR)
            stack.callback(os.close, theirs[number])
        elif stream == subprocess.STDOUT:
            theirs[number] = theirs[1]
        else:
            theirs[number] = number if stream is None else stream if isinstance(stream, int) else stream.fileno()
    return ours, theirs


def inside(argv):
    """(network namespace, command line) of one that begins with ``ip netns exec``; of others ("", argv).

    A fork has the network of a namespace, not its files of /etc.
    """
    return (argv[3], argv[4:]) if [*argv[:3]] == ["ip", "netns", "exec"] else ("", argv)


class Fork:
    """A fork, with what `Guarded` uses of subprocess.Popen."""

    def __init__(self, forks, pid, stdin, stdout):
        self._forks, self.pid, self.stdin, self.stdout, self.returncode = forks, pid, stdin, stdout, None

    def wait(self, timeout):
        """Its exit code, as of Popen; subprocess.TimeoutExpired."""
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            finally:
                os.close(pidfd)
            self.returncode = os.waitstatus_to_exitcode(self._forks.ask({"reap": self.pid}))
        return self.returncode


def serve(listening):
    """Fork at each request, until all connections are closed; returns in a fork: the request and its descriptors."""
    forks = {}  # those that are not reaped, by connection
    left = set()  # those of connections that have closed
    while True:
        for connection in select.select([listening, *forks], [], [], REAP_S if left else None)[0]:
            if connection is listening:
                forks[listening.accept()[0]] = set()
                continue
            message, descriptors, _, _ = socket.recv_fds(connection, 4 * ROOM, len(OWN_DESCRIPTORS))
            if not message:
                left |= forks.pop(connection)
                connection.close()
                if not forks:  # the tests are gone, however they came to their end
                    os._exit(0)
                continue
            request = json.loads(message)
            if pid := request.get("reap"):
                answer = os.waitpid(pid, 0)[1]
                forks[connection].discard(pid)
            elif not (answer := os.fork()):
                for other in (listening, *forks):
                    other.close()
                return request, descriptors
            else:
                forks[connection].add(answer)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(answer).encode())
        left = {pid for pid in left if not os.waitpid(pid, os.WNOHANG)[0]}


class NewProgram(BaseException):
    """Leaves the guard in its child, in the place of exec."""


def be_guard(request, descriptors):
    """Be a process that the launcher has started, and the guard in it; raises NewProgram in the guard's child."""
    os.setsid()
    os.chdir(request["cwd"])
    _sort(descriptors, request["descriptors"])
    os.environ.clear()
    os.environ.update(request["env"])
    _show(request["argv"])
    sys.argv, execvp = request["argv"], os.execvp

    def become(file, argv):
        os.execvp = execvp
        raise NewProgram(argv)

    os.execvp = become
    os._exit(guard.main())


def _sort(descriptors, numbers):
    """Give the descriptors these numbers, and close all others."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, OWN_DESCRIPTORS.stop) for descriptor in descriptors]
    os.closerange(0, OWN_DESCRIPTORS.stop)
    for descriptor, number in zip(above, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _show(argv):
    """Have ``/proc`` show this command line and the environment: they overwrite the server's (see proc(5), stat)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for first, words in ((45, argv), (47, [f"{name}={value}" for name, value in os.environ.items()])):
        begin, end = map(int, fields[first : first + 2])
        text = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def be_python(argv, path):
    """Run a Python command line as a new interpreter does whose own `path`, of packages, is this one."""
    namespace, argv = inside(argv)
    if namespace:
        with Path("/run/netns", namespace).open() as file:
            assert not ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET)
    _show(argv)
    for descriptor in range(3, OWN_DESCRIPTORS.stop):
        with contextlib.suppress(OSError):
            if not os.get_inheritable(descriptor):
                os.close(descriptor)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if (threads := int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))) > 1:  # the server has one
        torch.set_num_threads(threads)
    sys.path[:] = [first_path(argv[1:]), *_python_path(), *path]
    execute(argv[1:])


def first_path(words):
    """The folder in which ``python WORDS...`` looks for modules first."""
    return {"-c": "", "-m": str(Path.cwd())}.get(words[0], str(Path(words[0]).resolve().parent))


def execute(words):
    """Do what ``python WORDS...`` does: ``-c TEXT``, ``-m MODULE`` or a script, and arguments."""
    kind, program, *rest = words if words[0].startswith("-") else ("", *words)
    sys.argv = ["-c" if kind == "-c" else program, *rest]
    if kind == "-c":
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    elif kind == "-m":
        sys.modules.pop(program, None)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _python_path():
    """Folders of PYTHONPATH."""
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


if __name__ == "__main__":
    import gc

    import torch
    import torch._dynamo  # torch's optimizers load it, which takes as long as torch itself

    import farpipe.engine.launch.rank_main
    import farpipe.engine.stages.self_check  # noqa: F401 - loads transformers

    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only the thread that forks"  # noqa: PTH208
    own_path = sys.path[1 + len(_python_path()) :]  # that of any interpreter, whatever it runs
    _show([sys.executable, *sys.argv[:2]])
    gc.freeze()
    try:
        be_guard(*serve(socket.socket(fileno=int(sys.argv[1]))))
    except NewProgram as program:
        (argv,) = program.args
    be_python(argv, own_path)
