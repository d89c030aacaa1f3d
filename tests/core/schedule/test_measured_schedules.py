"""Schedules that were measured beside each other, against their simulation."""

import pytest

from benchmarks.cost_model.measured_schedules import predicted

MEASURED = {"interleaved": 10974, "zb-h1": 11411, "zbv": 11347, "v-half": 10894, "v-min": 8897.2}
"""Tokens/s of a device, Llama-2-7B on 8 MI300X: docs_deprecated/tech_blogs/primus_pipeline of AMD-AGI/Primus."""
MEASURED_1F1B = 10057


def test_gains_of_schedules_on_eight_devices_are_those_that_were_measured():
    """What was run are 16 layers: FLOPs of a token say so."""
    plain = predicted("1f1b")
    found = {name: predicted(name) for name in MEASURED}
    for name, rate in MEASURED.items():
        assert plain.step_s / found[name].step_s == pytest.approx(rate / MEASURED_1F1B, rel=0.05), name
        assert 32 * 4096 / 8 / found[name].step_s == pytest.approx(rate, rel=0.07), name
    slower = ["zb-h1", "v-half", "v-min"]
    assert [found[name].step_s for name in slower] == sorted(found[name].step_s for name in slower)
    held = {name: step.held_bytes(13.8) for name, step in found.items()}
    assert held["zbv"] / plain.held_bytes(13.8) == pytest.approx(18.11 / 16.26, rel=0.05)
    assert held["v-min"] < held["v-half"] < plain.held_bytes(13.8) < held["interleaved"]
