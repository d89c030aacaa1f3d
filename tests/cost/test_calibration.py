"""The constants of the law, by device."""

from cost_jobs import A100
from farpipe.catalog import device_names
from farpipe.cost import calibration_of
from farpipe.spec.written import WrittenDevice


def test_only_the_device_that_the_law_was_fitted_on_is_called_tested():
    tested = {name for name in device_names() if calibration_of(WrittenDevice(preset=name).resolve()).measured}
    assert tested == {"a100-80gb"}


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
