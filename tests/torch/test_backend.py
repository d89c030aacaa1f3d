"""The backend "farpipe" of torch.distributed: what three processes see of it."""

import json
import re
from pathlib import Path

import pytest
import torch

from farpipe.torch.backend import _message_memory
from job_files import cluster_text
from torch_processes import LIMIT_S, run_ranks, run_well, torchrun
from transports import tls_files

HERE = Path(__file__).parent
NUM_RANKS = 3
CHECKS = re.findall(r"^    (\w+),$", (HERE / "backend_rank.py").read_text().partition("\nCHECKS = (")[2], re.MULTILINE)
pytestmark = pytest.mark.slow

CLUSTER = cluster_text(num_devices=(2, 1), latency="2 ms", bandwidth="10 Gbit/s")


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Failed checks with their tracebacks, of each rank."""
    folder = tmp_path_factory.mktemp("group")
    tls_files(folder, ["zurich", "lugano"])
    (folder / "authority").rename(folder / "certs")
    (folder / "cluster.toml").write_text(CLUSTER)
    run_well(NUM_RANKS, HERE / "backend_rank.py", folder)
    return [json.loads((folder / f"errors-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("check", CHECKS)
def test_backend(failed, check):
    """See the function of this name in backend_rank.py; the first that fails keeps the others from being tried."""
    done = CHECKS[: min((CHECKS.index(name) for errors in failed for name in errors), default=len(CHECKS)) + 1]
    if check not in done:
        pytest.skip("an earlier one has failed")
    for rank, errors in enumerate(failed):
        assert check not in errors, f"rank {rank}: {errors[check]}"


def test_memory_is_not_page_locked_before_the_process_computes_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert len(_message_memory()(16)) == 16


def test_a_killed_process_raises_in_every_wait_of_the_others_and_a_failed_one_says_why(tmp_path):
    ended = run_ranks(NUM_RANKS, HERE / "leaving_rank.py", tmp_path)
    assert ended[2][0] == -9, ended[2]
    found = [json.loads((tmp_path / f"errors-{rank}.json").read_text()) for rank in range(2)]
    for errors in found:
        for error in errors[:4]:
            assert error["kind"] == "DistBackendError"
            assert "rank 2 is lost" in error["text"]
        assert errors[0]["seconds"] < LIMIT_S
    assert "rank 1 gave up: ValueError: the disk is full" in found[0][4]["text"]


def test_the_script_of_the_how_to_trains(tmp_path):
    page = (HERE.parent.parent / "docs" / "how-to" / "use-under-pytorch.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (script,) = [block for block in blocks if "init_process_group(" in block]
    (tmp_path / "two_stages.py").write_text(script)
    printed = torchrun(2, "two_stages.py", cwd=tmp_path)
    losses = [float(text) for text in re.findall(r"step \d: loss (\S+)", printed)]
    assert len(losses) == 5
    assert losses[4] < losses[0]
