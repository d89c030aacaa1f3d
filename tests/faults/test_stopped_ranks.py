"""A rank that is stopped, as on a machine that hangs: an outage like others, for a while or for good."""

import os
import signal
import threading
import time

import pytest

from farpipe.core.errors import RunError
from farpipe.engine.launch.run import run
from rank_processes import processes_of, wait_for_end_of_ranks
from trainings import equal_states, losses, metrics, state

pytestmark = pytest.mark.slow

OUTAGE_S = 5.0
LONGEST_S = 60.0
"""From a rank's stop for good to the end of the run: the limit, up to 2.5 s to notice that nothing comes, seconds to
end all ranks, and room for a busy machine."""


def test_a_stopped_rank_is_waited_for_but_not_for_ever_and_the_run_goes_on_from_there(
    make, undisturbed, program, tmp_path
):
    spec, run_dir, stopped_s = make(outage_s=OUTAGE_S), tmp_path / "run", []

    def stop(rank):
        process = processes_of(run_dir)[rank]
        os.kill(process, signal.SIGSTOP)
        stopped_s.append(time.monotonic())
        return process

    def on_step(line):
        if line["step"] >= 6 and not stopped_s:
            process = stop(1)
            threading.Timer(3.5, lambda: os.kill(process, signal.SIGCONT)).start()
        if line["step_s"] > 3 and len(stopped_s) == 1:  # the first stop is over, however many lines were read at once
            stop(0)

    with pytest.raises(RunError, match=r"rank 0 \(site site0\) is lost: .*the limit is 5 s \(outage_s\)"):
        run(spec, run_dir, on_step=on_step, rank_program=program(pause_s=0.05))
    assert time.monotonic() - stopped_s[1] < LONGEST_S
    wait_for_end_of_ranks(run_dir)
    assert max(line["step_s"] for line in metrics(run_dir)) > 3, "the first stop was not felt"
    assert run(spec, run_dir, resume=True).num_attempts == 2, "the first stop was survived in place"
    expected_losses, expected_state = undisturbed(1)
    assert losses(run_dir) == expected_losses
    assert equal_states(state(run_dir, spec), expected_state)
