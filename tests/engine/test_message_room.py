"""Buffers by what a plan has in flight: a send never waits for room where the plan says it doesn't."""

import pytest

from farpipe.core.errors import InfeasibleError
from farpipe.core.step import Hop, Link, Transfer
from farpipe.engine.launch import host_memory
from farpipe.engine.launch.rank_main import transport_config
from farpipe.engine.message_room import LEAST_BYTES, buffer_bytes, leaving_bytes, message_sizes, page_locked_bytes
from farpipe.planning.cost.transfer import wire_bytes
from trainings import make_run

MB = 10**6


def run_with(num_bytes, *, method="gpipe", **options):
    """Two ranks, four microbatches, messages of so many bytes."""
    run = make_run("text", method=method, **options)
    transfer = Transfer(link="site0>site1", bytes=num_bytes)
    hop = Hop(forward=transfer, backward=transfer)
    links = {"site0>site1": Link(latency_s=0.01, bandwidth_bytes_per_s=1e9)}
    return run.with_plan(problem=run.plan.problem.model_copy(update={"hops": (hop,), "links": links}))


def test_buffers_hold_what_the_order_has_in_flight(monkeypatch):
    assert buffer_bytes(run_with(1000)) == LEAST_BYTES
    assert buffer_bytes(run_with(100 * MB)) == 1.25 * 4 * 100 * MB
    assert buffer_bytes(run_with(200 * MB, method="1f1b")) == 1.25 * 2 * 200 * MB
    assert leaving_bytes(run_with(100 * MB), 0) == leaving_bytes(run_with(100 * MB), 1) == 500 * MB
    monkeypatch.setenv("RANK", "0")
    config = transport_config(run_with(100 * MB), "127.0.0.1", 0, None, None, allow_plaintext=False)
    assert config.buffer_bytes == 500 * MB


def test_sizes_of_messages_are_those_on_each_link():
    run = run_with(1000, method="1f1b", wire_type="int8")
    assert message_sizes(run, 0, 6144, 4, 3) == {wire_bytes(6144, 4, "int8"): 4}
    assert message_sizes(run_with(1000, method="1f1b"), 1, 6144, 4, 3) == {6144 * 4: 4}


def test_page_locked_memory_must_be_there_before_ranks_start(tmp_path, monkeypatch):
    run = run_with(33 << 20).model_copy(update={"device": "cuda"})
    assert page_locked_bytes(run) == 2 * 2 * 4 * (64 << 20), "both directions, at both ends, as powers of two"
    (tmp_path / "meminfo").write_text("MemAvailable: 1000000 kB\n")
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "OWN_CGROUP", tmp_path / "none")
    with pytest.raises(InfeasibleError, match=r"page-locked memory for messages take 1 GiB.*make microbatches smaller"):
        host_memory.expect_memory(run)
    host_memory.expect_memory(run_with(1000).model_copy(update={"device": "cuda"}))
