"""A main thread that sits inside a collective while the run has broken; `collective` stands for torch's."""

import threading

import pytest

from farpipe.core.errors import RunError
from farpipe.engine.site import end_hung
from farpipe.engine.site.end_hung import ending_hung


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(end_hung, "GRACE_S", 0.3)
    monkeypatch.setattr(end_hung, "_POLL_S", 0.01)


class Run:
    """A run that breaks when `broken` is set."""

    def __init__(self):
        self.broken, self.ended, self.errors = threading.Event(), threading.Event(), []

    def check(self, context):
        if self.broken.is_set():
            raise RunError(f"{context}: rank 3 is lost")

    def end(self, error):
        self.errors.append(str(error))
        self.ended.set()


def test_a_process_that_hangs_in_a_collective_is_ended_with_the_reason():
    run = Run()
    with ending_hung(run.check, run.end):
        run.broken.set()
        assert run.ended.wait(60)
    assert run.errors == ["inside a collective of the replicas at this site: rank 3 is lost"]


def test_a_main_thread_that_leaves_by_itself_is_left_alone():
    run = Run()
    run.broken.set()
    with pytest.raises(RunError, match="given up"), ending_hung(run.check, run.end):
        raise RunError("given up")
    assert not run.ended.wait(0.5)


def test_a_broken_collective_tells_the_reason_that_the_transport_hears_later():
    run = Run()
    threading.Timer(0.05, run.broken.set).start()
    with pytest.raises(RunError, match="rank 3 is lost"), ending_hung(run.check, run.end):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def test_a_broken_collective_of_a_sound_run_is_an_error_of_its_own_and_other_errors_stay():
    run = Run()
    with pytest.raises(RunError, match="replicas at this site broke: gloo timed out"), ending_hung(run.check, run.end):
        raise RuntimeError("gloo timed out\nat line 5")
    with pytest.raises(RuntimeError, match="shapes differ"), ending_hung(run.check, run.end):
        raise RuntimeError("shapes differ")
