"""Trainings whose connections are interrupted: a short outage costs time, a long one ends in a state to go on from."""

import random
import threading
import time

import pytest

from farpipe.core.errors import RunError
from farpipe.engine.launch.run import RANK_PROGRAM, run
from farpipe.engine.links import Wan
from trainings import checkpoints, equal_states, folder, losses, metrics, state
from transports import tls_files
from wans import both_ways, free_name, needs_wan

pytestmark = pytest.mark.slow

SITES = ("site0", "site1")
OUTAGE_S = 2.0
LONGEST_S = 60.0
"""From the beginning of an outage over the limit to the end of the run: the limit, a few seconds to notice that nothing
comes, a few to end all ranks, and room for a busy machine."""


class Interruptions:
    """`on_step` of a run: short outages of a proxy, which also breaks connections at any byte."""

    def __init__(self, proxy, at, seconds):
        self.proxy, self.at, self.seconds = proxy, set(at), seconds

    def __call__(self, line):
        if line["step"] in self.at:
            self.proxy.blocked = True
            self.proxy.mean_bytes = 50_000
            self.proxy.cut_all()
            threading.Timer(self.seconds, self.mend).start()

    def mend(self):
        self.proxy.blocked = False


def test_short_outages_cost_time_and_nothing_else(make, undisturbed, program, proxy, tmp_path):
    """Two replicas with ZeRO-1; benchmarks/engine/soak.py does the same with one."""
    tls_files(tmp_path, SITES)
    spec = make(num_replicas=2)
    rank_program = program("--certs", tmp_path / "authority", proxy=proxy.answer_routes(), pause_s=0.05)
    proxy.mean_bytes = 200_000
    interruptions = Interruptions(proxy, at=(4, 17, 30), seconds=0.7)
    summary = run(spec, tmp_path / "run", on_step=interruptions, rank_program=rank_program)
    expected_losses, expected_state = undisturbed(2)
    assert summary.num_attempts == 1, "survived in place"
    assert losses(tmp_path / "run") == expected_losses
    assert equal_states(state(tmp_path / "run", spec), expected_state)
    assert proxy.num_cuts > 10
    assert max(line["step_s"] for line in metrics(tmp_path / "run")) > 0.5, "the outage was not felt"


def damage_newest(run_dir):
    """One bit of one file of the newest checkpoint; its step."""
    step = checkpoints(run_dir)[0]
    path = folder(run_dir, step) / "rank-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-random.Random(0).randrange(1, 1000)] ^= 1
    path.write_bytes(data)
    return step


def test_a_long_outage_ends_in_time_and_the_run_goes_on_even_from_the_checkpoint_before_a_damaged_one(
    make, undisturbed, program, proxy, tmp_path
):
    spec = make(outage_s=OUTAGE_S)
    rank_program = program(proxy=proxy.answer_routes(), pause_s=0.05)
    cut_s = []

    def on_step(line):
        if line["step"] >= 22 and not cut_s:
            cut_s.append(time.monotonic())
            proxy.blocked = True
            proxy.cut_all()

    with pytest.raises(RunError, match=r"rank \d \(site site\d\) is lost: .*the limit is 2 s \(outage_s\)"):
        run(spec, tmp_path / "run", on_step=on_step, rank_program=rank_program)
    assert OUTAGE_S <= time.monotonic() - cut_s[0] < LONGEST_S
    assert not (tmp_path / "run" / "summary.json").exists()
    proxy.blocked = False
    damaged = damage_newest(tmp_path / "run")
    summary = run(spec, tmp_path / "run", resume=True, rank_program=rank_program)
    assert summary.num_attempts == 2
    assert any(f"step-{damaged}/" in text for line in metrics(tmp_path / "run") for text in line.get("warnings", ()))
    expected_losses, expected_state = undisturbed(1)
    assert losses(tmp_path / "run") == expected_losses
    assert equal_states(state(tmp_path / "run", spec), expected_state)


@needs_wan
def test_over_kernel_links_a_short_outage_is_survived_and_a_long_one_can_be_gone_on_from(make, undisturbed, tmp_path):
    """One run with two replicas: an outage of 1 s, then one that lasts, then on from there."""
    tls_files(tmp_path, SITES)
    rank_program = (*RANK_PROGRAM, "--certs", str(tmp_path / "authority"))
    spec, run_dir, cut_s = make(num_replicas=2, outage_s=4.0), tmp_path / "run", []
    expected_losses, expected_state = undisturbed(2)
    with Wan.up(SITES, both_ways(*SITES, latency_s=0.002, mbit_per_s=200), name=free_name()) as wan:

        def on_step(line):
            if line["step"] >= 5 and not cut_s:
                cut_s.append(time.monotonic())
                wan.cut("site0<>site1")
                threading.Timer(1.0, lambda: wan.mend("site0<>site1")).start()
            if line["step"] >= 22 and len(cut_s) == 1:
                cut_s.append(time.monotonic())
                wan.cut("site0<>site1")

        with pytest.raises(RunError, match=r"rank \d \(site site\d\) is lost: .*the limit is 4 s \(outage_s\)"):
            run(spec, run_dir, on_step=on_step, wan=wan, rank_program=rank_program)
        assert time.monotonic() - cut_s[1] < LONGEST_S
        done = losses(run_dir)
        assert len(done) >= 23, "the first outage was survived"
        assert done == expected_losses[: len(done)]
        wan.mend("site0<>site1")
        assert run(spec, run_dir, resume=True, wan=wan, rank_program=rank_program).num_attempts == 2
    assert losses(run_dir) == expected_losses
    assert equal_states(state(run_dir, spec), expected_state)
