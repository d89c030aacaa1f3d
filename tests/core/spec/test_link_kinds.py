"""Kinds of links between sites: TCP, RDMA over a distance, lossless OTN, and the fibre's delay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.core.spec.cluster import TCP_WINDOW_BYTES
from job_files import sites_text

JOB = f"""
[model]
preset = "llama-2-13b"
[training]
sequence_length = 4096
global_batch = 64
{sites_text("here", "there", device="a100-80gb", num_devices=(16, 8))}[[cluster.links]]
between = ["here", "there"]
bandwidth = "100 Gbit/s"
"""


def link(*lines, delay='latency = "50 ms"'):
    return parse_job("\n".join([JOB, delay, *lines])).cluster.links[0]


def rate(*lines, delay='latency = "50 ms"'):
    return link(*lines, delay=delay).bandwidth_bytes_per_s


def test_a_written_link_may_have_streams_or_an_rdma_window():
    assert rate() == 100e9 / 8
    assert rate("streams = 4") == pytest.approx(4 * TCP_WINDOW_BYTES / 0.1)
    assert rate('window = "16 MB"') == pytest.approx(16e6 / 0.1)
    assert rate('window = "16 MB"', 'acknowledged = "source"') == 100e9 / 8


def test_rdma_over_a_distance_is_bound_by_its_window_unless_the_source_acknowledges():
    km = "fibre_km = 1000"
    assert rate('kind = "rdma"', delay=km) * 8 == pytest.approx(13.06e9, rel=1e-3)
    assert rate('kind = "rdma"', 'window = "64 MB"', delay=km) * 8 == pytest.approx(52.2e9, rel=1e-3)
    assert rate('kind = "rdma"', 'acknowledged = "source"', delay=km) == 100e9 / 8
    granted = rate('kind = "rdma"', 'acknowledged = "source"', 'budget = "40 Gbit/s"', delay=km)
    assert granted == 40e9 / 8


def test_a_lossless_otn_carries_all_that_its_buffer_holds_in_a_round_trip():
    assert rate('kind = "lossless-otn"', delay="fibre_km = 3000") == 100e9 / 8
    assert rate('kind = "lossless-otn"', 'buffer = "1 GB"', delay="fibre_km = 3000") == 100e9 / 8
    assert rate('kind = "lossless-otn"', 'buffer = "50 MB"', delay="fibre_km = 3000") == pytest.approx(50e6 / 29.4e-3)


@given(st.floats(0, 20_000), st.floats(1, 1e5))
def test_the_buffer_that_fills_the_link_is_its_rate_times_the_round_trip(km, megabytes):
    lines = ('kind = "lossless-otn"', f'buffer = "{megabytes} MB"')
    needed = 100e9 / 8 * 2 * km * 4.9e-6
    found = rate(*lines, delay=f"fibre_km = {km}")
    assert found == pytest.approx(100e9 / 8 * min(1.0, megabytes * 1e6 / needed if needed else 1.0))


def test_the_delay_follows_from_kilometres_of_fibre():
    assert link(delay="fibre_km = 1000").latency_s == pytest.approx(4.9e-3)
    assert link(delay="fibre_km = 0").latency_s == 0


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["fibre_km = 10", 'latency = "1 ms"'], r"links.0.*\.latency: the latency follows from fibre_km"),
        (["fibre_km = -1"], "fibre_km: .*-1"),
        (["fibre_km = 1e9"], "half of the Earth"),
        (["fibre_km = 10", 'kind = "rmda"'], "kind"),
        (["fibre_km = 10", 'acknowledged = "source"'], "acknowledged: acknowledgements at the source need a window"),
        (["fibre_km = 10", 'kind = "rdma"', 'budget = "1 Gbit/s"'], 'budget: .*acknowledged = "source"'),
        (["fibre_km = 10", 'kind = "rdma"', 'buffer = "1 GB"'], 'buffer: .*kind = "lossless-otn"'),
        (["fibre_km = 10", 'kind = "lossless-otn"', 'window = "1 MB"'], "window: .*leave this out"),
        (["fibre_km = 10", 'kind = "lossless-otn"', 'acknowledged = "source"'], "acknowledged: .*leave this out"),
        (["fibre_km = 10", 'kind = "lossless-otn"', "loss = 0.001"], "loss: .*has no loss"),
        (["fibre_km = 10", 'kind = "rdma"', "streams = 4"], "streams: .*has no streams"),
        (["fibre_km = 10", 'kind = "rdma"', 'window = "0 MB"'], "window: must be more than zero"),
    ],
)
def test_keys_that_do_not_belong_together_are_named(lines, words):
    with pytest.raises(InputError, match=words):
        parse_job("\n".join([JOB, *lines]))


def test_fibre_in_metres_is_refused():
    with pytest.raises(InputError, match="half of the Earth's circumference"):
        link(delay="fibre_km = 64300")
