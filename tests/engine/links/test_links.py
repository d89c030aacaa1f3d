import multiprocessing
import time
from itertools import pairwise

import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.engine.links import EmulatedLinks, LinkShape
from farpipe.testing import check_link

SHAPES = {"a>b": LinkShape(latency_s=0.020, bandwidth_bytes_per_s=25e6), "b>a": LinkShape(0.05, 1e9)}


@pytest.fixture
def links():
    links = EmulatedLinks.create(SHAPES)
    yield links
    links.close()


@pytest.mark.parametrize("shape", [*SHAPES.values(), LinkShape(0.0, float("inf"))])
def test_emulated_links_pass_the_public_check(shape):
    check_link(shape)


def test_the_check_names_what_links_do_wrong():
    class Overlapping(EmulatedLinks):
        def reserve(self, name, num_bytes):
            return self.reserve_beside(name, num_bytes)

    class OverlappingShape(LinkShape):
        create, open = Overlapping.create, Overlapping.open

    with pytest.raises(AssertionError, match="before the one in front has left"):
        check_link(OverlappingShape(0.01, 1e6))


def test_a_message_takes_its_bytes_over_the_rate_and_then_the_latency(links):
    before = time.monotonic_ns()
    passage = links.reserve("a>b", 500_000)
    assert before <= passage.start_ns <= time.monotonic_ns()
    assert passage.end_ns - passage.start_ns == 20_000_000
    assert passage.arrival_ns - passage.end_ns == 20_000_000


def test_messages_on_one_link_follow_each_other_and_their_latencies_overlap(links):
    passages = [links.reserve("a>b", 2_500_000) for _ in range(5)]
    for earlier, later in pairwise(passages):
        assert later.start_ns == earlier.end_ns
        assert later.arrival_ns - earlier.arrival_ns == 100_000_000


def test_a_link_that_was_idle_starts_at_once(links):
    first = links.reserve("a>b", 25_000)
    time.sleep(0.01)
    assert links.reserve("a>b", 1).start_ns > first.end_ns


def test_directions_and_other_links_do_not_share(links):
    busy = links.reserve("a>b", 25_000_000)
    assert links.reserve("b>a", 1).end_ns < busy.end_ns


def test_control_slips_in_but_takes_its_share_of_the_rate(links):
    data = links.reserve("a>b", 2_500_000)
    control = links.reserve_beside("a>b", 250_000)
    assert control.start_ns < data.end_ns
    assert control.end_ns - control.start_ns == 10_000_000
    assert links.reserve("a>b", 0).start_ns == data.end_ns + 10_000_000


def test_an_infinite_rate_leaves_latency_alone():
    links = EmulatedLinks.create({"x>y": LinkShape(0.001, float("inf"))})
    passage = links.reserve("x>y", 1 << 40)
    assert passage.end_ns == passage.start_ns
    links.close()


def test_processes_that_open_the_same_links_share_them(links):
    other = EmulatedLinks.open(links.path, SHAPES)
    first, second = links.reserve("a>b", 2_500_000), other.reserve("a>b", 2_500_000)
    assert second.start_ns == first.end_ns
    other.close()


def test_different_shapes_are_refused(links):
    with pytest.raises(InputError, match="different links"):
        EmulatedLinks.open(links.path, {"a>b": LinkShape(0.02, 25e6)})


def test_links_of_a_process_that_is_gone_are_not_found():
    with pytest.raises(RunError, match="all ranks on one machine"):
        EmulatedLinks.open("/proc/1/fd/999999", SHAPES)


@pytest.mark.parametrize(("latency", "rate"), [(-1, 1), (float("nan"), 1), (float("inf"), 1), (0, 0), (0, -5)])
def test_impossible_shapes_are_refused(latency, rate):
    with pytest.raises(InputError, match="emulated link"):
        LinkShape(latency, rate)


def reserve_many(path, count, queue):
    links = EmulatedLinks.open(path, SHAPES)
    queue.put([links.reserve("a>b", 2_500) for _ in range(count)])
    links.close()


@pytest.mark.slow
def test_two_processes_on_one_link_never_overlap(links):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=reserve_many, args=(links.path, 300, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    passages = sorted(queue.get(timeout=60) + queue.get(timeout=60))
    for process in processes:
        process.join()
    assert len(passages) == 600
    assert all(later.start_ns >= earlier.end_ns for earlier, later in pairwise(passages))


def test_a_link_can_change_while_it_is_in_use(links):
    before = links.reserve("a>b", 25_000_000)
    other = EmulatedLinks.open(links.path, SHAPES)
    other.change("a>b", LinkShape(0.25, 1e3))
    other.close()
    after = links.reserve("a>b", 1000)
    assert after.start_ns == before.end_ns, "the queue stays"
    assert after.end_ns - after.start_ns == 1_000_000_000
    assert after.arrival_ns - after.end_ns == 250_000_000
    assert links.shape("a>b") == LinkShape(0.25, 1e3)
    assert links.shape("b>a") == SHAPES["b>a"]
