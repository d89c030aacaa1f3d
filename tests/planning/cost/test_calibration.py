"""The constants of the law, by device."""

import datetime

from cost_jobs import A100
from farpipe.core.catalog import device_names
from farpipe.core.spec.written import WrittenDevice
from farpipe.planning.cost import calibration_of


def law(name):
    return calibration_of(WrittenDevice(preset=name).resolve())


def test_a_device_is_called_measured_if_its_row_was_fitted_to_measurements_of_it():
    for name in device_names():
        assert law(name).measured == (law(name).num_rows > 0)
    assert {name for name in device_names() if not law(name).measured} == {
        *("v100-32gb", "rtx-4090", "l4", "t4", "ascend-910b", "cpu"),
        *("a100-pcie-40gb", "a100-pcie-80gb", "h100-pcie", "h100-nvl"),
    }


def test_every_row_has_a_date_and_the_rates_that_were_compared():
    for name in device_names():
        row, peaks = law(name), WrittenDevice(preset=name).resolve().peak_flops
        assert datetime.date(2025, 1, 1) <= row.date <= datetime.date.today()
        assert set(row.compared) <= set(peaks)
        assert bool(row.compared) == row.measured


def test_devices_behind_one_bus_share_it_and_others_do_not():
    assert law("rtx-3090").crowd(2) == 1.0
    assert law("rtx-3090").crowd(8) == 4.0
    assert law("h100").crowd(8) == 1.0


def test_every_row_says_where_it_comes_from():
    sources = [calibration_of(WrittenDevice(preset=name).resolve()).source for name in device_names()]
    assert all(len(source) > 20 for source in sources)
    assert len(set(sources)) > 1


def test_an_unknown_device_gets_the_law_scaled_to_its_peak_rate():
    mine = A100.model_copy(update={"name": "mine", "peak_flops": {"bf16": 2 * 312e12}})
    law, reference = calibration_of(mine), calibration_of(A100)
    assert law.wave_elements == 2 * reference.wave_elements
    assert law.matrix_fraction == reference.matrix_fraction
    assert "mine" in law.source
