"""Memory of large stages by torch's own sharding over processes that are not there, against the cost model.

All stages and degrees: benchmarks/cost_model/divided_state.py.
"""

import warnings

import pytest
import torch.distributed as dist

from benchmarks.cost_model.divided_state import ENDS, NUM_PROCESSES, FakeStore, measured, predicted
from farpipe.core.spec.load import preset_model


@pytest.fixture
def processes_that_are_not_there():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_PROCESSES)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("llama-3-70b", "first"), ("llama-3-405b", "last")])
def test_weights_gradients_and_states_of_a_large_stage_are_those_of_the_planner(
    processes_that_are_not_there, name, stage
):
    case = preset_model(name), ENDS[stage], 8, 8
    assert measured(*case)[:3] == pytest.approx(predicted(*case)[:3], rel=0.01)
