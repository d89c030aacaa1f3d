"""Replicas that wait for the slowest of them, and ranks that go from stage to stage."""

import pytest

from farpipe.core.spec import Cluster, Training, preset_model, preset_site
from farpipe.planning.cost import JobCosts, Layout, calibration_of, place_evenly
from farpipe.planning.cost.step import overhead_parts

SITE = preset_site("site", "a100-80gb", 4096)
LAW = calibration_of(SITE.device)
SLOWEST = "waiting for the slowest replica"


def _overhead(data: int, context: int = 1) -> dict[str, float]:
    training = Training(sequence_length=2048, global_batch=data * 4, zero=1)
    layout = Layout(1, data, 1, 1, 1, 4, context=context)
    costs = JobCosts(preset_model("llama-2-7b"), training)
    return overhead_parts(costs, layout, place_evenly(["site"], [32]), Cluster(sites=(SITE,)))


def test_the_share_is_that_of_the_largest_of_exponential_delays():
    assert LAW.slowest(1) == LAW.slowest(8) == 0.0
    harmonic = sum(1 / k for k in range(9, 513))
    assert LAW.slowest(512) == pytest.approx(LAW.replica_lateness * harmonic, rel=1e-5)


def test_more_replicas_wait_longer_and_context_parallel_devices_count():
    at_8, at_64, at_512 = (_overhead(data)[SLOWEST] for data in (8, 64, 512))
    assert 0.0 == at_8 < at_64 < at_512
    assert _overhead(64, 8)[SLOWEST] > 0.0


@pytest.mark.parametrize(("virtual", "overlap", "changes"), [(1, False, False), (2, False, True), (2, True, False)])
def test_ranks_of_several_stages_that_wait_for_what_they_send_take_longer(virtual, overlap, changes):
    training = Training(sequence_length=2048, global_batch=8, overlap=overlap, zero=0)
    costs = JobCosts(preset_model("llama-2-7b"), training)

    def stage_of(stages: int):
        layout = Layout(4, 1, 1, stages, 1, 8)
        return costs.stage(layout, SITE, 4, "none", embedding=False, head=False)

    plain, changed = stage_of(1), stage_of(virtual)
    more_s = LAW.stage_change_s if changes else 0.0
    assert changed.forward_s == pytest.approx(plain.forward_s + more_s)
    assert changed.input_grad_s == pytest.approx(plain.input_grad_s + more_s)
    assert changed.weight_grad_s == plain.weight_grad_s
