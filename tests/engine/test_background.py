import threading

import pytest

from farpipe.engine.replicas.background import BackgroundThread
from waiting import wait_until


def test_work_is_done_in_order_and_beside_the_main_thread():
    background, done = BackgroundThread("test"), []
    jobs = [background.start(lambda number=number: done.append((number, threading.get_ident()))) for number in range(9)]
    for job in jobs:
        job.result()
    assert [number for number, _ in done] == [*range(9)]
    assert threading.get_ident() not in {thread for _, thread in done}


def test_an_error_comes_out_where_the_result_is_asked_for_and_later_work_is_done():
    background = BackgroundThread("test")
    failed, fine = background.start(lambda: 1 / 0), background.start(lambda: 7)
    assert fine.result() == 7
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_no_thread_is_left_when_there_is_no_work():
    background = BackgroundThread("a thread of this test")
    for _ in range(20):
        background.start(lambda: None).result()
    name = "a thread of this test"
    wait_until(lambda: all(thread.name != name for thread in threading.enumerate()), "the thread had ended")
