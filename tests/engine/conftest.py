"""Settings of all tests of the engine."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_rank():
    """Ranks are often threads of one process here, more than there are cores: torch's own threads would only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
