"""Outputs of network tools as a link, with their units."""

import json
from pathlib import Path

import pytest

from farpipe.errors import InputError
from farpipe.interop.link_tests import link_of, mixed_units, read_link_test, with_measured_links
from farpipe.spec import load_job

IPERF3 = {
    "start": {"test_start": {"protocol": "TCP", "num_streams": 4}},
    "end": {
        "streams": [{"sender": {"min_rtt": 20400, "mean_rtt": 21000}}, {"sender": {"min_rtt": 20100}}],
        "sum_sent": {"bits_per_second": 9.5e9},
        "sum_received": {"bits_per_second": 9.4e9},
    },
}
MTR = {"report": {"mtr": {"dst": "b"}, "hubs": [{"host": "x", "Avg": 1.0}, {"host": "b", "Loss%": 0.0, "Avg": 20.2}]}}
PING = """PING b (10.0.0.2) 56(84) bytes of data.
5 packets transmitted, 5 received, 0% packet loss, time 4006ms
rtt min/avg/max/mdev = 20.010/20.080/20.211/0.070 ms
"""
MAC_PING = "round-trip min/avg/max/stddev = 19.000/20.080/21.000/0.070 ms\n"
NCCL = """# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor)
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    36.10    0.00    0.00      0    35.90    0.00    0.00      0
   134217728      33554432     float     sum      -1   1000.2   134.2   234.8      0   1001.0   134.1   234.6      0
# Out of bounds values : 0 OK
"""
SENDRECV = """#       size         count      type   redop    root     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
   134217728      33554432     float    none      -1   5621.3   23.88   23.88       0
"""
LABELLED = "\n".join(f"0: {line}" for line in NCCL.splitlines())
SLOW_FIRST = NCCL.replace(
    " 134217728      33554432",
    "        16             4     float     sum      -1    166.7    0.00    0.00\n 134217728      33554432",
).replace("36.10", "983.2")
PERFTEST = """ #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      5000             11820.0            11800.5            0.188808
"""
GBITS = """ #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      5000             392.1              390.4              0.744
"""
OLD_SENDRECV = """#                                               out-of-place                       in-place
#       size         count      type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
    37748744      37748744     uint8    11732    3.22    3.24  0e+00    11698    3.23    3.23  3e+02
"""
OLD_BROADCAST = """\
#       size         count    type    root     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2   float       0    45.82    0.00    0.00    N/A    38.17    0.00    0.00    N/A
  2147483648     536870912   float       0   360000    5.96    5.97    N/A   360000    5.96    5.96    N/A
"""
TAGGED = "".join(f"[1,0]<stdout>:{line}\n" for line in NCCL.splitlines())
LATENCY = """ #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]
 2       1000          1.10           5.21         1.14             1.15             0.05            1.30
 4096    1000          2.10           6.21         2.14             2.15             0.05            2.30
"""  # noqa: E501
TIMED_LATENCY = (
    " #bytes        #iterations       t_avg[usec]    tps average\n 2             4321000          1.16           862\n"
)
UDP = {"start": {}, "end": {"sum": {"bits_per_second": 1048716.9, "lost_percent": 32.0}}}
STREAM = """{"event":"start","data":{"version":"iperf 3.17"}}
{"event":"interval","data":{"sum":{"bits_per_second":1}}}
{"event":"end","data":{"sum_received":{"bits_per_second":1.58e9}}}
"""
HOPS = {"mtr": {"dst": "9.9.9.9"}, "hubs": [{"host": "192.168.2.1", "Loss%": 0.0, "Avg": 8.163}]}
QPERF = "tcp_bw:\n    bw  =  1.15 GB/sec\ntcp_lat:\n    latency  =  10.05 ms\n"
QPERF_RUNS = "tcp_bw:\n    bw  =  298 MB/sec\n    bw  =  315 MB/sec\n    bw  =  311 MB/sec\n"
QPERF_SIZES = """tcp_lat:
    latency   =  10.5 us
    msg_size  =     1 bytes
tcp_lat:
    latency   =  13 us
    msg_size  =   2 KiB (2,048)
tcp_lat:
    latency   =  59.3 us
    msg_size  =    64 KiB (65,536)
"""
QPERF_UDP = "udp_bw:\n    send_bw  =  2.46 GB/sec\n    recv_bw  =  1.87 GB/sec\n"
QPERF_BITS = "tcp_bw:\n    bw  =  31.7 Gb/sec\n"
QPERF_UNIFIED = "tcp_bw:\n    bw  =  3,960,000,000 bytes/sec\ntcp_lat:\n    latency  =  11100 ns\n"
QPERF_READ = "rc_rdma_read_lat:\n    latency  =  5 us\nrc_bi_bw:\n    bw  =  4 GB/sec\n"
READ_LATENCY = f"""                    RDMA_Read Latency Test
{LATENCY.splitlines()[0]}
Conflicting CPU frequency values detected: 2200.000000 != 1040.353000. CPU Frequency is not max.
 2       1000          6.88           16.81        7.04              7.06         0.31      7.38        16.81
"""
HISTOGRAM = LATENCY.splitlines()[0] + "\n#, usec\n1, 3.60000\n2, 3.70000\n" + LATENCY
BOTH_WAYS = "                    RDMA_Write Bidirectional BW Test\n" + GBITS


@pytest.mark.parametrize(
    ("text", "tool", "latency_s", "rate"),
    [
        (json.dumps(IPERF3), "iperf3", 10.05e-3, 9.4e9 / 8),
        (json.dumps(MTR), "mtr", 10.1e-3, None),
        (PING, "ping", 10.04e-3, None),
        (MAC_PING, "ping", 10.04e-3, None),
        (NCCL, "nccl-tests", 36.1e-6, 234.8e9),
        (SENDRECV, "nccl-tests", None, 23.88e9),
        (PERFTEST, "perftest", None, 11800.5 * 2**20),
        (GBITS, "perftest", None, 390.4e9 / 8),
        (QPERF, "qperf", 10.05e-3, 1.15e9),
        (OLD_SENDRECV, "nccl-tests", None, 3.24e9),
        (OLD_BROADCAST, "nccl-tests", 45.82e-6, 5.97e9),
        (TAGGED, "nccl-tests", 36.1e-6, 234.8e9),
        (LABELLED, "nccl-tests", 36.1e-6, 234.8e9),
        (SLOW_FIRST, "nccl-tests", 166.7e-6, 234.8e9),
        (LATENCY, "perftest", 1.14e-6, None),
        (TIMED_LATENCY, "perftest", 1.16e-6, None),
        (QPERF_RUNS, "qperf", None, 315e6),
        (QPERF_SIZES, "qperf", 10.5e-6, None),
        (QPERF_UDP, "qperf", None, 1.87e9),
        (QPERF_BITS, "qperf", None, 31.7e9 / 8),
        (QPERF_UNIFIED, "qperf", 11.1e-6, 3.96e9),
        (QPERF_READ, "qperf", 2.5e-6, 2e9),
        (READ_LATENCY, "perftest", 3.52e-6, None),
        (HISTOGRAM, "perftest", 1.14e-6, None),
        (BOTH_WAYS, "perftest", None, 390.4e9 / 16),
        (json.dumps(UDP), "iperf3", None, 1048716.9 * 0.68 / 8),
        (STREAM, "iperf3", None, 1.58e9 / 8),
    ],
)
def test_each_tool_in_its_units(text, tool, latency_s, rate, tmp_path):
    """Old forms as in nccl-tests #104 and #82, aws-k8s-tester PR 503, iperf #584 and #1784, mtr-exporter #33; runs,
    sizes and directions of qperf as in its source and in what others wrote down of it."""
    path = tmp_path / "out.txt"
    path.write_text(text)
    found = read_link_test(path)
    assert found.tool == tool
    assert found.latency_s == (latency_s and pytest.approx(latency_s))
    assert found.bandwidth_bytes_per_s == (rate and pytest.approx(rate))


@pytest.mark.parametrize("text", ["hello", "{}", '{"report": 3}', '{"model_type": "llama"}', "--num-layers 3"])
def test_other_files_are_none(text, tmp_path):
    (tmp_path / "x").write_text(text)
    assert read_link_test(tmp_path / "x") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(IPERF3 | {"error": "unable to connect"}), "iperf3 failed: unable to connect"),
        (json.dumps(IPERF3 | {"end": {}}), "iperf3 received nothing"),
        (json.dumps({"report": {"hubs": [{"host": "b", "Loss%": 100.0, "Avg": 0.0}]}}), "no answer of the last hop, b"),
        ("\n".join(NCCL.splitlines()[:4]), "nccl-tests printed no row"),
        (PERFTEST.splitlines()[0], "perftest printed no row"),
        (LATENCY.splitlines()[0] + "\n 12288 10 3.60 4.90 3.70 3.75", "message of perftest has 12288 bytes"),
        (NCCL.replace("GB/s", "Gbit/s"), "unit 'Gbit/s' is unknown; expected one of MiB"),
        (json.dumps({"start": {}, "error": "control socket has closed"}), "iperf3 failed: control socket"),
        (json.dumps({"report": HOPS}), "mtr ended at 192.168.2.1, before 9.9.9.9: allow more hops"),
        ("4 packets transmitted, 0 received, 100% packet loss, time 3055ms", "x: ping got no answer"),
        (NCCL.replace("234.8", "0.00"), "nccl-tests measured 0 GB/s: every process ran alone"),
        (LATENCY.splitlines()[0], "perftest printed no row"),
        (QPERF.replace("GB/sec", "furlong"), "x: unit 'furlong' is unknown"),
    ],
)
def test_a_test_that_failed_is_told(text, words, tmp_path):
    (tmp_path / "x").write_text(text)
    with pytest.raises(InputError, match=words):
        read_link_test(tmp_path / "x")


def test_the_best_figures_make_the_link(tmp_path):
    for name, text in (("a", json.dumps(IPERF3)), ("b", PING), ("c", GBITS)):
        (tmp_path / name).write_text(text)
    link = link_of(read_link_test(tmp_path / name) for name in "abc")
    assert link == {"latency": ("10.04 ms", "ping, b, one way"), "bandwidth": ("390.4 Gbit/s", "perftest, c")}


def test_rates_that_are_eight_times_another_are_told(tmp_path):
    """A row of nccl-tests copied as Gbit/s, where iperf3 has bits."""
    (tmp_path / "nccl").write_text(SENDRECV)
    (tmp_path / "iperf3").write_text(json.dumps(IPERF3).replace("9400000000.0", "23880000000.0"))
    tests = [read_link_test(tmp_path / name) for name in ("nccl", "iperf3")]
    assert mixed_units(tests) == (
        "191 Gbit/s (nccl-tests, nccl) is 8 times 23.9 Gbit/s (iperf3, iperf3): were bits and bytes mixed up?",
    )
    assert "23.9 Gbit/s (the job)" in mixed_units(tests[:1], [23.88e9 / 8])[0]
    assert mixed_units(tests[1:], [1.25e9]) == ()


TWO_SITES = Path(__file__).parents[2] / "recipes" / "two_sites.toml"


def test_measurements_take_the_place_of_a_job_s_link(tmp_path):
    for name, text in (("ping", PING), ("iperf3", json.dumps(IPERF3))):
        (tmp_path / name).write_text(text)
    job, notes = with_measured_links(load_job(TWO_SITES), [tmp_path / "ping", tmp_path / "iperf3"])
    assert len(job.cluster.links) == 2
    assert notes == ()
    for link in job.cluster.links:
        assert (link.latency_s, link.bandwidth_bytes_per_s) == pytest.approx((10.04e-3, 9.4e9 / 8))


def test_other_files_are_refused_as_links(tmp_path):
    (tmp_path / "x").write_text("hello")
    with pytest.raises(InputError, match="no output of iperf3"):
        with_measured_links(load_job(TWO_SITES), [tmp_path / "x"])


def test_measurements_of_one_link_are_refused_for_several(tmp_path):
    (tmp_path / "ping").write_text(PING)
    three = TWO_SITES.with_name("three_sites_asymmetric.toml")
    with pytest.raises(InputError, match="write the figures into cluster"):
        with_measured_links(load_job(three), [tmp_path / "ping"])
