"""Memory of messages that is used again."""

import threading

import numpy as np

from farpipe.engine.transport.buffers import LEAST_BYTES, Buffers

SIZE = LEAST_BYTES


def made_by(sizes):
    def make(num_bytes):
        sizes.append(num_bytes)
        return np.empty(num_bytes, np.uint8).data

    return Buffers(make)


def test_what_is_let_go_of_is_handed_out_again():
    sizes = []
    buffers = made_by(sizes)
    for number in range(10):
        memory = buffers(SIZE)
        memory[:4] = number.to_bytes(4, "little")
    del memory
    assert sizes == [SIZE] * 2, "the second is asked for while the first is in use"


def test_what_any_view_shares_is_kept():
    sizes = []
    buffers = made_by(sizes)
    views = [np.frombuffer(buffers(SIZE)[8:16], np.uint8)[2:] for _ in range(3)]
    for number, view in enumerate(views):
        view[:] = number
    assert len(sizes) == 3
    buffers(SIZE)[:] = bytes(SIZE)
    assert [view.tolist() for view in views] == [[number] * 6 for number in range(3)]


def test_it_never_has_more_than_was_in_use_at_once():
    sizes = []
    buffers = made_by(sizes)
    first = [buffers(SIZE) for _ in range(4)]
    first.clear()
    second = [buffers(2 * SIZE) for _ in range(2)]
    assert sizes == [SIZE] * 4 + [2 * SIZE] * 2
    second.clear()
    assert len(buffers(2 * SIZE)) == 2 * SIZE
    assert len(sizes) == 6
    buffers(SIZE)
    assert sizes[6:] == [SIZE], "those of the first size were given up for the second"


def test_threads_that_lend_and_let_go_at_once():
    buffers, wrong = made_by([]), []

    def work(number):
        for _ in range(300):
            memory = np.frombuffer(buffers(SIZE), np.uint8)
            memory[:64] = number
            if (memory[:64] != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wrong == []
