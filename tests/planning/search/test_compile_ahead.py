import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parents[3] / "recipes" / "two_sites.toml"
SIGNATURES = """
from farpipe.core.schedule.library import list_kernel
from farpipe.planning.search import compile_ahead, greedy_kernel, local_kernel

kernels = (list_kernel.play, greedy_kernel.greedy, local_kernel.anneal)
compile_ahead.main()
ahead = [list(kernel.signatures) for kernel in kernels]

from farpipe import planning
from farpipe.core.spec import load_job

planning.plan(load_job({job!r}))
assert [list(kernel.signatures) for kernel in kernels] == ahead
print(*map(len, ahead))
"""


@pytest.mark.slow
def test_a_plan_asks_for_no_kernel_of_orders_that_was_not_compiled_ahead():
    done = subprocess.run([sys.executable, "-c", SIGNATURES.format(job=str(JOB))], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1 1 1\n", "")
