"""Ranks that die, hang, give up or leave: real processes, real signals."""

import threading
import time

import pytest

from farpipe.core.errors import RunError
from farpipe.engine.launch.launcher import launch
from farpipe.engine.transport import PeerError, Tag
from farpipe.engine.transport.health import EXPLANATION_S, Health
from transports import connected, in_parallel, printed, program

TAG = Tag(4, 1, 7)


def receive(transport, peer, tag=TAG, waiting_for="2F7"):
    return transport.receive(peer, "forward", tag, waiting_for=waiting_for)


MIDDLE_OF_A_STEP = """
with reporting_errors(), join(timeout_s={timeout_s}) as transport:
    transport.exchange("all here", b"", waiting_for="the start")
    if RANK == 1:
        print("victim", flush=True)
        time.sleep(1)  # the others are through the exchange by now: a kill may take with it what was not read yet
        os.kill(os.getpid(), signal.{signal})
        time.sleep(60)
    start = time.monotonic()
    try:
        transport.receive(1, "forward", Tag(4, 1, 7), waiting_for=f"{{RANK}}F7")
    finally:
        print(f"waited {{time.monotonic() - start:.3f}} s", flush=True)
"""


def waited_s(log_dir, rank):
    return float(printed(log_dir, rank).partition("waited ")[2].partition(" s")[0])


@pytest.mark.slow
def test_when_a_rank_is_killed_all_others_say_so_within_seconds(tmp_path):
    body = MIDDLE_OF_A_STEP.format(timeout_s=60, signal="SIGKILL")
    with pytest.raises(RunError, match=r"rank 1 was killed by SIGKILL; the last it printed:\s+\| victim"):
        launch(program(body), 3, log_dir=tmp_path)
    for rank in (0, 2):
        text = printed(tmp_path, rank)
        assert "PeerError" in text
        assert f"{rank}F7: waited for the forward message of step 4, stage 1, microbatch 7 from rank 1" in text
        lost = "rank 1 is lost" in text
        assert lost or (rank == 2 and "rank 0 is lost" in text), "rank 0 ends for the same reason, maybe first"
        assert waited_s(tmp_path, rank) < 30, "half of timeout_s"


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_by_the_limit_and_removed(tmp_path):
    body = MIDDLE_OF_A_STEP.format(timeout_s=1, signal="SIGSTOP")
    with pytest.raises(
        RunError, match=r"rank [02] failed: [02]F7: waited for .* from rank 1: it did not come within 1 s"
    ):
        launch(program(body), 3, log_dir=tmp_path)
    assert all(1 <= waited_s(tmp_path, rank) < 30 for rank in (0, 2))


def test_a_message_that_never_comes_ends_the_wait_of_all_ranks():
    with connected(3, timeout_s=0.5) as ranks:

        def wait(rank, peer):
            with pytest.raises(RunError) as caught:
                receive(ranks[rank], peer)
            return caught.value

        errors = in_parallel(lambda: wait(0, 1), lambda: time.sleep(0.3) or wait(2, 0))
        assert str(errors[0]) == (
            "2F7: waited for the forward message of step 4, stage 1, microbatch 7 from rank 1: "
            "it did not come within 0.5 s; nothing else waits in this channel"
        )
        assert type(errors[1]) is PeerError
        assert "from rank 0: rank 0 gave up: 2F7: waited for" in str(errors[1])


@pytest.mark.slow
def test_an_overdue_message_shows_what_came_instead():
    with connected(timeout_s=0.5) as (first, second):
        for i in range(6):
            first.send(1, "forward", Tag(4, 0, i), bytes(1 << 20))
        with pytest.raises(
            RunError, match=r"waiting in this channel, 6 MiB: \(step 4, stage 0, microbatch 0\), .*\.\.\."
        ):
            receive(second, 0)


def test_an_abort_reaches_everybody_who_waits():
    with connected(3) as ranks:

        def wait(rank):
            with pytest.raises(PeerError, match=r"2F7: .*rank 1 gave up: loss is not a number"):
                receive(ranks[rank], 1)

        in_parallel(lambda: wait(0), lambda: wait(2), lambda: time.sleep(0.2) or ranks[1].abort("loss is not a number"))
        with pytest.raises(RunError, match="this rank gave up: loss is not a number"):
            receive(ranks[1], 0)
        with pytest.raises(PeerError, match="rank 1 gave up"):
            ranks[0].exchange("norm", b"", waiting_for="the norm")
        with pytest.raises(PeerError, match="rank 1 gave up"):
            ranks[0].send(2, "forward", Tag(0, 0, 0), bytes(4))
        with pytest.raises(PeerError, match="rank 1 gave up"):
            ranks[0].post(2, "report", b"")


def test_an_error_inside_the_context_is_told_to_the_others():
    with connected() as (first, second):
        with pytest.raises(ZeroDivisionError), first:
            raise ZeroDivisionError("no microbatches")
        with pytest.raises(PeerError, match="rank 0 gave up: ZeroDivisionError: no microbatches"):
            receive(second, 0)


def test_waiting_for_a_rank_that_has_left_ends_at_once():
    with connected() as (first, second):
        first.send(1, "forward", Tag(4, 1, 6), b"\1")
        first.close()
        assert receive(second, 0, Tag(4, 1, 6)).data == b"\1"
        with pytest.raises(PeerError, match="from rank 0: that rank has ended its work without sending it"):
            receive(second, 0)


def test_an_exchange_with_a_rank_that_has_left_ends_at_once():
    with connected() as (first, second):
        first.close()
        with pytest.raises(
            PeerError, match="the norm: waited for rank 0 in the exchange 'x': that rank has ended its work"
        ):
            second.exchange("x", b"", waiting_for="the norm")


def test_sending_to_a_rank_that_has_left_is_refused():
    with connected() as (first, second):
        first.close()
        with pytest.raises(PeerError):
            receive(second, 0)
        with pytest.raises(RunError, match=r"rank 0 has ended its work; the forward message of .* is too late"):
            second.send(0, "forward", Tag(0, 0, 0), bytes(4))


@pytest.mark.slow
def test_ranks_may_leave_at_different_times_without_a_loss():
    with connected(3) as ranks:
        ranks[1].close()
        time.sleep(0.7)
        ranks[0].send(2, "forward", Tag(4, 1, 7), b"\1")
        assert receive(ranks[2], 0).data == b"\1"
        ranks[2].close()
        ranks[0].close()


@pytest.mark.slow
def test_the_silent_process_is_blamed_and_not_one_that_left_because_of_it():
    """Rank 0, through which the word of rank 3 would come, is stopped; rank 3 has given it up a moment earlier."""
    health = Health(lambda reason: None)
    health.pause(("its connection", 0))
    gives_up = threading.Timer(EXPLANATION_S + 0.3, lambda: health.fail(PeerError("rank 0 is lost"), announce=None))
    gives_up.start()
    health.lose(3, "its port refuses connections")
    gives_up.join()
    assert str(health.error) == "rank 0 is lost"
