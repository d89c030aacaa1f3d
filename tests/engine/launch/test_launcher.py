"""Nothing of a run may outlive it: real processes, real kills."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from farpipe.core.errors import InfeasibleError, InputError, RunError
from farpipe.engine.launch.launcher import launch
from farpipe.engine.launch.reports import reporting_errors
from transports import printed
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("new_processes")]

GRANDCHILDREN = """
import os, subprocess, sys, time
same_session = subprocess.Popen(["sleep", "300"])
own_session = subprocess.Popen(["sleep", "300"], start_new_session=True)
orphan = subprocess.Popen(["sh", "-c", "setsid sleep 300 & exit 0"]).wait()
"""

LAUNCHER = """
import sys
from pathlib import Path
from farpipe.engine.launch.launcher import launch
launch(lambda rank: [sys.executable, "-c", Path(sys.argv[1]).read_text()], 2, log_dir=Path(sys.argv[2]))
"""


def run(body, num_ranks=2, **options):
    """`launch` with the same Python text for all ranks."""
    text = "import os, sys, time\nRANK = int(os.environ['RANK'])\n" + textwrap.dedent(body)
    launch(lambda rank: [sys.executable, "-c", text], num_ranks, **options)


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """Most tests here have ranks that would never end by themselves."""
    monkeypatch.setattr("farpipe.engine.launch.launcher.SETTLE_S", 0.3)


@pytest.fixture
def mark(monkeypatch):
    """Every process that this test starts, however indirectly, has this in its environment."""
    mark = f"FARPIPE_TEST_MARK={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))
    yield mark
    for process in marked(mark):
        os.kill(process, signal.SIGKILL)


def marked(mark):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


def test_ranks_find_what_torchrun_gives_in_their_environment(tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS COLOUR"
    run(f"print(*(os.environ[name] for name in '{names}'.split()))", 2, log_dir=tmp_path, env={"COLOUR": "blue"})
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        assert printed(tmp_path, rank) == f"{rank} {rank} 2 2 127.0.0.1 {threads} blue\n"


def test_rank_0_inherits_the_listening_socket_that_the_others_are_told_of(tmp_path):
    run(
        """
        import socket
        own = socket.socket(fileno=int(os.environ["FARPIPE_MASTER_LISTEN_FD"])) if RANK == 0 else None
        address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        if RANK == 0:
            own.accept()[0].sendall(b"rank 0")
        else:
            print(socket.create_connection(address, timeout=5).recv(6, socket.MSG_WAITALL).decode())
        """,
        log_dir=tmp_path,
    )
    assert printed(tmp_path, 1) == "rank 0\n"


def test_every_run_has_its_own_token(tmp_path):
    tokens = set()
    for _ in range(2):
        run("print(os.environ['FARPIPE_RUN_TOKEN'])", 2, log_dir=tmp_path)
        assert printed(tmp_path, 0) == printed(tmp_path, 1)
        tokens.add(printed(tmp_path, 0))
    assert len(tokens) == 2


def test_a_given_port_is_used_and_a_taken_one_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} can't be listened on: Address already in use"):
            run("", log_dir=tmp_path, master_port=port)
    run("print(os.environ['MASTER_PORT'])", log_dir=tmp_path, master_port=port)
    assert printed(tmp_path, 1) == f"{port}\n"


def test_ticks_come_while_the_ranks_run(tmp_path, monkeypatch):
    monkeypatch.setattr("farpipe.engine.launch.launcher.TICK_S", 0.05)
    ticks = []
    run("time.sleep(0.5)", log_dir=tmp_path, on_tick=lambda: ticks.append(time.monotonic()))
    assert len(ticks) >= 3


def test_the_end_of_the_log_explains_a_rank_that_broke(tmp_path, mark):
    with pytest.raises(RunError) as caught:
        run("print('loading'); time.sleep(60 * RANK); 1 / 0", log_dir=tmp_path)
    text = str(caught.value)
    assert text.startswith("rank 0 ended with exit code 1; the last it printed:")
    assert "| loading" in text
    assert "| ZeroDivisionError: division by zero" in text
    assert f"log: {tmp_path / 'rank-0.log'}" in text
    wait_until(lambda: not marked(mark), "nothing is left of the run")


def test_the_signal_that_killed_a_rank_is_named(tmp_path, mark):
    with pytest.raises(RunError, match="rank 1 was killed by SIGSEGV and printed nothing"):
        run("os.kill(os.getpid(), 11) if RANK == 1 else time.sleep(60)", log_dir=tmp_path)
    wait_until(lambda: not marked(mark), "nothing is left of the run")


def test_a_log_does_not_grow_without_end_and_says_what_was_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr("farpipe.engine.launch.launcher.MAX_LOG_BYTES", 100_000)
    monkeypatch.setattr("farpipe.engine.launch.launcher._KEPT_BYTES", 1_000)
    run(
        """
        print("the first line")
        for number in range(400):
            print("x" * 999, flush=True)
            time.sleep(0.005)
        print("the last line")
        """,
        1,
        log_dir=tmp_path,
    )
    text = printed(tmp_path, 0)
    assert len(text) < 300_000
    assert text.startswith("the first line")
    assert text.endswith("the last line\n")
    assert "bytes here: logs end at 100,000]" in text


def test_a_rank_that_does_not_end_after_its_work_is_killed_and_counts_as_it_was_to_end(tmp_path, monkeypatch, mark):
    monkeypatch.setattr("farpipe.engine.launch.launcher.OVERDUE_S", 1.0)
    said, stubborn = (
        [],
        "import signal, time; from farpipe.engine.launch.reports import report_done; report_done({}); time.sleep(60)",
    )
    run(stubborn.format(0), log_dir=tmp_path, on_notice=said.append)
    assert [text[:7] for text in said] == ["rank 0:", "rank 1:"]
    with pytest.raises(InputError):
        run(stubborn.format(3), 1, log_dir=tmp_path)
    wait_until(lambda: not marked(mark), "nothing is left of the run")


REPORTING = """
from farpipe.core import errors
from farpipe.engine.launch.reports import reporting_errors
class PeerError(errors.RunError):
    because_of_peer = True
with reporting_errors():
"""


@pytest.mark.parametrize("kind", [InputError, InfeasibleError, RunError])
def test_a_rank_that_reports_its_error_is_quoted(tmp_path, kind):
    with pytest.raises(kind) as caught:
        run(REPORTING + f"    raise errors.{kind.__name__}('job.toml: model.layers: none')", log_dir=tmp_path)
    assert re.fullmatch(r"rank \d failed: job.toml: model.layers: none \(log: .*rank-\d.log\)", str(caught.value))


@pytest.mark.parametrize(("code", "kind"), [(1, RunError), (3, InputError), (4, InfeasibleError), (77, RunError)])
def test_without_a_report_the_exit_code_tells_the_kind(tmp_path, code, kind):
    with pytest.raises(kind, match=f"rank 0 ended with exit code {code}; the last it printed:\\s+\\| job.toml: bad"):
        run(f"print('job.toml: bad') if RANK == 0 else time.sleep(60)\nsys.exit({code})", log_dir=tmp_path)


def test_the_cause_is_shown_even_when_its_effects_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr("farpipe.engine.launch.launcher.SETTLE_S", 20)
    with pytest.raises(RunError, match="rank 1 failed: the disk is full"):
        run(
            REPORTING
            + """
    if RANK != 1:
        raise PeerError("rank 1 gave up: the disk is full")
    time.sleep(0.5)
    raise errors.RunError("the disk is full")
""",
            3,
            log_dir=tmp_path,
        )


def test_what_nccl_ends_is_an_effect_of_the_rank_that_was_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("farpipe.engine.launch.launcher.SETTLE_S", 5.0)
    text = "the cause comes later, as from a rank that waits for its own reasons"
    body = f"""
    if RANK == 0:
        print("[rank0]: ProcessGroupNCCL's watchdog: taking the entire process down", flush=True)
        os.abort()
    time.sleep(0.5)
    sys.exit({text!r})
    """
    with pytest.raises(RunError, match="rank 1 ended with exit code 1") as caught:
        run(body, log_dir=tmp_path)
    assert text in str(caught.value)


def test_a_report_is_only_written_under_the_launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError), reporting_errors():
        raise RunError("x")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path, mark):
    start_s = time.monotonic()
    with pytest.raises(RunError, match="rank 0 ended with exit code 5"):
        run(
            "import signal; signal.signal(15, signal.SIG_IGN); print('deaf') if RANK else time.sleep(1)\n"
            "time.sleep(100) if RANK else sys.exit(5)",
            log_dir=tmp_path,
        )
    assert time.monotonic() - start_s < 90, "it sleeps for 100 s"
    assert printed(tmp_path, 1) == "deaf\n"
    wait_until(lambda: not marked(mark), "nothing is left of the run")


def test_what_ranks_leave_behind_ends_with_them(tmp_path, mark):
    run(GRANDCHILDREN, log_dir=tmp_path)
    wait_until(lambda: not marked(mark), "nothing is left of the run")


def test_what_a_killed_rank_leaves_behind_ends_with_it(tmp_path, mark):
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        run(
            GRANDCHILDREN + "os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(60)", log_dir=tmp_path
        )
    wait_until(lambda: not marked(mark), "nothing is left of the run")


def test_a_program_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(RunError, match=r"rank 0 ended with exit code 127; .*\n  \| no-such-program: can't be run"):
        launch(lambda rank: ["no-such-program"], 1, log_dir=tmp_path)


def test_a_log_directory_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/logs: can't be made: Not a directory"):
        run("", log_dir=tmp_path / "file" / "logs")


@pytest.fixture
def launcher(tmp_path, mark):
    """A launcher process of two ranks with grandchildren in sessions of their own, all of them up."""
    (tmp_path / "rank.py").write_text(GRANDCHILDREN + "print('up', flush=True)\ntime.sleep(300)")
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "rank.py"), str(tmp_path)]
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
            wait_until(lambda: all(log.exists() and "up" in log.read_text() for log in logs), "both ranks were up")
            # Launcher; guard, rank, three sleeps. A process has no environment while it turns into another program.
            wait_until(lambda: len(marked(mark)) == 1 + 2 * (1 + 1 + 3), "all processes were there")
            yield process
        finally:
            process.kill()


def test_when_the_launcher_is_killed_everything_ends_and_no_file_stays(launcher, mark, tmp_path):
    launcher.kill()
    wait_until(lambda: marked(mark) == [], "all processes of the run had ended")
    assert [*(tmp_path / "temporary").iterdir()] == []


def test_when_a_guard_is_killed_its_rank_ends_and_the_run_with_it(launcher, mark):
    guards = [process for process in marked(mark) if b"guard.py" in Path(f"/proc/{process}/cmdline").read_bytes()]
    os.kill(guards[0], signal.SIGKILL)
    assert launcher.wait(60) == 1
    assert "was killed by SIGKILL" in launcher.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_ends_everything_and_is_passed_on(launcher, mark, number):
    launcher.send_signal(number)
    assert launcher.wait(60) == -signal.SIGINT  # how Python itself ends on KeyboardInterrupt; a shell shows 130
    assert "KeyboardInterrupt" in launcher.stderr.read()
    wait_until(lambda: not marked(mark), "nothing is left of the run")
