"""Links of a job from measured matrices, and what windows leave of a link."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import load_job, load_table, parse_job
from farpipe.core.spec.cluster import windowed_rate
from farpipe.planning.explain import explained
from job_files import sites_text

HEAD = """
[model]
name = "small"
num_layers = 4
hidden = 256
num_heads = 4
num_kv_heads = 4
ffn_hidden = 1024
vocab_size = 1000
[training]
sequence_length = 128
global_batch = 8
"""
SITES = "\n" + sites_text("here", "there", device="a100-80gb", num_devices=(16, 8))
MATRICES = """
[cluster.matrices]
throughput = "throughput.csv"
rtt = "rtt.csv"
regions = { here = "x:one", there = "x:two" }
"""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("throughput.csv", "src_region,dst_region,throughput_gbit_s", "x:one,x:two,5", "x:two,x:one,4")
    write("rtt.csv", "src_region,dst_region,avg_rtt_ms", "x:one,x:two,100")
    return tmp_path


def write(name, *lines):
    from pathlib import Path

    Path(name).write_text("\n".join(lines) + "\n")


def links(*more, sites=SITES, matrices=MATRICES):
    job = parse_job(HEAD + sites + matrices + "\n".join(more) + "\n")
    return {link.name: link for link in job.cluster.links}


def test_files_are_seen_from_the_job_s_folder_or_else_from_where_farpipe_runs(files, monkeypatch):
    (files / "job.toml").write_text(HEAD + SITES + MATRICES)
    (files / "elsewhere").mkdir()
    monkeypatch.chdir(files / "elsewhere")
    assert len(load_job("../job.toml").cluster.links) == 2
    assert load_table("../job.toml")["cluster"]["matrices"]["rtt"] == "../rtt.csv"
    write("throughput.csv", "src_region,dst_region,throughput_gbit_s", "x:one,x:two,1")
    (files / "throughput.csv").unlink()
    (link,) = load_job("../job.toml").cluster.links
    assert link.bandwidth_bytes_per_s == 1e9 / 8


def test_each_direction_has_its_own_rate_and_half_the_round_trip():
    found = links()
    assert {name: link.bandwidth_bytes_per_s for name, link in found.items()} == {
        "here>there": 5e9 / 8,
        "there>here": 4e9 / 8,
    }
    assert {link.latency_s for link in found.values()} == {0.05}


def test_what_is_written_goes_before_the_matrix():
    text = '[[cluster.links]]\nfrom = "here"\nto = "there"\nlatency = "1 ms"\nbandwidth = "9 Gbit/s"\n'
    found = links(sites=SITES + text)
    assert found["here>there"].bandwidth_bytes_per_s == 9e9 / 8
    assert found["there>here"].bandwidth_bytes_per_s == 4e9 / 8


def test_rates_of_machines_add_up_to_those_of_the_smaller_site():
    assert links('per = "machine"')["here>there"].bandwidth_bytes_per_s == 5e9 / 8
    larger = SITES.replace("num_devices = 8", "num_devices = 32")
    assert links('per = "machine"', sites=larger)["here>there"].bandwidth_bytes_per_s == 2 * 5e9 / 8


def test_streams_are_bound_by_their_windows():
    assert links("streams = 10")["here>there"].bandwidth_bytes_per_s == pytest.approx(10 * 2.7e6 / 0.1)
    assert links("streams = 10", 'window = "1 MB"')["here>there"].bandwidth_bytes_per_s == pytest.approx(1e8)
    assert links("streams = 1000")["here>there"].bandwidth_bytes_per_s == 5e9 / 8


def test_other_columns_and_rows_can_be_chosen():
    write(
        "throughput.csv",
        "src_region,src_tier,dst_region,rate",
        "x:one,slow,x:two,1",
        "x:one,fast,x:two,7",
        "x:two,fast,x:one,7",
    )
    found = links('throughput_column = "rate"', 'only = { src_tier = "fast" }')
    assert found["here>there"].bandwidth_bytes_per_s == 7e9 / 8


def test_egress_comes_with_the_link_and_a_missing_price_stays_unknown():
    write("egress.csv", "src_region,dst_region,usd_per_gb", "x:one,x:two,0.02")
    found = links('egress = "egress.csv"')
    assert (found["here>there"].egress_usd_per_gb, found["there>here"].egress_usd_per_gb) == (0.02, None)


def test_a_region_may_be_the_site_s_name():
    write("throughput.csv", "src_region,dst_region,throughput_gbit_s", "here,there,5", "there,here,4")
    write("rtt.csv", "src_region,dst_region,avg_rtt_ms", "here,there,100")
    assert len(links(matrices='[cluster.matrices]\nthroughput = "throughput.csv"\nrtt = "rtt.csv"\n')) == 2


def test_a_matrix_of_one_direction_joins_no_pipeline_and_the_plan_says_so():
    write("throughput.csv", "src_region,dst_region,throughput_gbit_s", "x:one,x:two,5")
    document = explained(planning.find(parse_job(HEAD + SITES + MATRICES))[0])
    assert len(set(document.plan.sites)) == 1
    assert any("no link both ways" in line for line in document.explanation.advice)


@pytest.mark.parametrize(
    ("name", "lines", "words"),
    [
        ("throughput.csv", ["src_region,dst_region,throughput_gbit_s"], "throughput.csv: no row behind the header"),
        ("throughput.csv", ["a,b"], "expected a column 'src_region'"),
        ("throughput.csv", ["src_region,dst_region,gbps", "x:one,x:two,5"], "no column 'throughput_gbit_s'"),
        ("throughput.csv", ["src_region,dst_region,throughput_gbit_s", "x:one,x:two,fast"], "line 2: .* number"),
        ("throughput.csv", ["src_region,dst_region,throughput_gbit_s", "x:one,x:two,-5"], "a number from 0"),
        (
            "throughput.csv",
            ["src_region,dst_region,throughput_gbit_s", "x:one,x:two"],
            "line 2: expected 3 columns, found 2",
        ),
        ("throughput.csv", ["src_region,dst_region,throughput_gbit_s", "x:one,x:three,5"], "no region 'x:two'"),
        ("rtt.csv", ["src_region,dst_region,avg_rtt_ms", "x:one,x:three,5"], "there is a throughput but no round trip"),
    ],
)
def test_bad_matrices_are_told_with_file_and_place(name, lines, words):
    write(name, *lines)
    with pytest.raises(InputError, match=rf"cluster\.matrices: .*{words}"):
        links()


def test_a_file_that_is_missing_and_a_site_that_is_unknown_are_named():
    with pytest.raises(InputError, match=r"nowhere\.csv"):
        links(matrices=MATRICES.replace("rtt.csv", "nowhere.csv"))
    with pytest.raises(InputError, match=r"there is no site .hera.; did you mean .here."):
        links(matrices=MATRICES.replace("here =", "hera ="))


def test_so_many_sites_that_nobody_means_all_links_are_refused_at_once():
    many = "".join(f'[[cluster.sites]]\nname = "s{n}"\ndevice = "a100-80gb"\nnum_devices = 1\n' for n in range(1000))
    with pytest.raises(InputError, match=r"1,000 sites are more than 300"):
        links(sites=many, matrices=MATRICES.replace("regions", "# "))


@given(st.floats(1, 1e12), st.floats(1, 1e9), st.floats(0, 1), st.integers(1, 100))
def test_more_window_streams_or_nearness_never_slows_and_the_link_bounds_all(rate, window, rtt, streams):
    found = windowed_rate(rate, window, rtt, streams)
    assert found <= rate
    assert windowed_rate(rate, 2 * window, rtt, streams) >= found
    assert windowed_rate(rate, window, rtt, streams + 1) >= found
    assert windowed_rate(rate, window, rtt / 2, streams) >= found


@pytest.mark.parametrize("column", ["rate_mbps", "rate_Mbit_s", "gbytes_per_s", "rate_GB/s", "MiBps", "kbit"])
def test_a_column_of_another_unit_is_refused(column):
    write("throughput.csv", f"src_region,dst_region,{column}", "x:one,x:two,5000", "x:two,x:one,4000")
    with pytest.raises(InputError, match="throughputs are in Gbit/s"):
        links(f'throughput_column = "{column}"')


@pytest.mark.parametrize("column", ["rtt_s", "rtt_us", "rtt (s)", "rtt_seconds"])
def test_round_trips_in_other_units_are_refused(column):
    write("rtt.csv", f"src_region,dst_region,{column}", "x:one,x:two,0.1")
    with pytest.raises(InputError, match="round trips in ms"):
        links(f'rtt_column = "{column}"')


@pytest.mark.parametrize("column", ["rate_gbit_s", "rate_Gbps", "Gbit/s", "gbits", "bandwidth", "hours_s_mean"])
def test_other_names_of_a_column_are_taken(column):
    write("throughput.csv", f"src_region,dst_region,{column}", "x:one,x:two,5", "x:two,x:one,4")
    assert links(f'throughput_column = "{column}"')["here>there"].bandwidth_bytes_per_s == 5e9 / 8
