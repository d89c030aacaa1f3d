"""Outputs of network tools as a link, with their units."""

import json
from pathlib import Path

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import load_job
from farpipe.interop.link_tests import read_link_test
from farpipe.interop.measured_links import link_of, mixed_units, read_link_tests, with_measured_links
from farpipe.interop.settings import link_lines

IPERF3 = {
    "start": {"test_start": {"protocol": "TCP", "num_streams": 4}},
    "end": {
        "streams": [{"sender": {"min_rtt": 20400, "mean_rtt": 21000}}, {"sender": {"min_rtt": 20100}}],
        "sum_sent": {"bits_per_second": 9.5e9},
        "sum_received": {"bits_per_second": 9.4e9},
    },
}
LAST_HOP = {"host": "b", "Loss%": 0.0, "Avg": 21.7, "Best": 20.2, "StDev": 0.1}
MTR = {"report": {"mtr": {"dst": "b"}, "hubs": [{"host": "x", "Avg": 1.0}, LAST_HOP]}}
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
        (PING, "ping", 10.005e-3, None),
        (MAC_PING, "ping", 9.5e-3, None),
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
        (
            json.dumps({"start": {"connected": []}, "error": "control socket has closed"}),
            "iperf3 failed: control socket",
        ),
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
    assert link.there == {"latency": ("10.01 ms", "ping, b, one way"), "bandwidth": ("390.4 Gbit/s", "perftest, c")}
    assert (link.back, link.notes) == ({}, ())


def iperf3(gbits=9.4, back=None, ends=("10.0.0.1", "10.9.0.1"), end=None, **test_start):
    """JSON of a TCP test; `end` and further keys come into it as given."""
    received = {"sum_received": {"bits_per_second": gbits * 1e9}}
    received |= {"sum_received_bidir_reverse": {"bits_per_second": back * 1e9}} if back else {}
    at = {
        "connected": [{"local_host": ends[0], "remote_host": ends[1]}],
        "test_start": {"protocol": "TCP"} | test_start,
    }
    return json.dumps({"start": at, "end": end or received})


UDP_END = {"sum": {"bits_per_second": 1e9, "lost_percent": 1.5, "jitter_ms": 2.0, "packets": 1000}}


def link_from(tmp_path, *texts):
    for index, text in enumerate(texts):
        (tmp_path / f"{index}").write_text(text)
    return link_of(read_link_tests(tmp_path / f"{index}" for index in range(len(texts))).values())


@pytest.mark.parametrize(
    "texts",
    [
        (iperf3(8.7, reverse=0), iperf3(1.3, reverse=1)),
        (iperf3(1.3, reverse=1), iperf3(8.7, reverse=0)),
        (iperf3(8.7, back=1.3, bidir=1),),
        (iperf3(8.7), iperf3(1.3, ends=("10.9.0.1", "10.0.0.1"))),  # run once at each end
        (iperf3(8.7), PING, iperf3(1.3, reverse=1)),
    ],
)
def test_the_other_direction_has_its_own_rate(texts, tmp_path):
    link = link_from(tmp_path, *texts)
    assert (link.there["bandwidth"][0], link.back["bandwidth"][0]) == ("8.7 Gbit/s", "1.3 Gbit/s")
    lines = "\n".join(link_lines(["a", "b"], link.there, link.back))
    assert lines.count("[[cluster.links]]") == 2
    assert lines.index('from = "a"') < lines.index("8.7 Gbit/s") < lines.index('from = "b"') < lines.index("1.3 Gbit/s")
    job, notes = with_measured_links(load_job(TWO_SITES), [tmp_path / f"{index}" for index in range(len(texts))])
    assert [one.bandwidth_bytes_per_s * 8e-9 for one in job.cluster.links] == pytest.approx([8.7, 1.3])
    assert "there is taken as" in notes[-1]


def test_a_rate_of_one_direction_counts_for_both(tmp_path):
    link = link_from(tmp_path, iperf3(1.3, reverse=1))
    assert link.there["bandwidth"][0] == "1.3 Gbit/s"
    assert "measured backwards only" in link.notes[0]
    assert link_from(tmp_path, iperf3(1.35, reverse=1), iperf3(1.3)).back == {}


@pytest.mark.parametrize(
    "text",
    [
        iperf3(0.25, target_bitrate=250_000_000),
        iperf3(0.999, target_bitrate=250_000_000, num_streams=4),  # iperf3's -b is that of each stream
        iperf3(0.001, protocol="UDP", target_bitrate=1_048_576, end={"sum": {"bits_per_second": 1.048e6}}),
        iperf3(0.001, protocol="UDP", end={"sum": {"bits_per_second": 1.048e6, "lost_percent": 0.0}}),
        json.dumps(
            {"start": {"version": "3.17", "fq_rate": 10**9}, "end": {"sum_received": {"bits_per_second": 0.95e9}}}
        ),
        iperf3(0.25, target_bitrate=250_000_000, reverse=1),
    ],
)
def test_a_rate_that_was_held_down_is_a_lower_bound(text, tmp_path):
    link = link_from(tmp_path, text)
    assert "a lower bound" in link.there["bandwidth"][1]
    assert "the link may carry more" in " ".join(link.notes)
    before = load_job(TWO_SITES)
    job, notes = with_measured_links(before, [tmp_path / "0"])
    assert "the link may carry more" in " ".join(notes)
    assert job.cluster.links[0].bandwidth_bytes_per_s == max(before.cluster.links[0].bandwidth_bytes_per_s, 0.95e9 / 8)


@pytest.mark.parametrize(
    "text",
    [
        iperf3(9.4, target_bitrate=0),
        iperf3(9.4, target_bitrate=20 * 10**9),
        iperf3(9.4, target_bitrate=5 * 10**9, num_streams=4),
    ],
)
def test_a_rate_that_was_not_reached_is_the_link_s(text, tmp_path):
    link = link_from(tmp_path, text)
    assert link.there == {"bandwidth": ("9.4 Gbit/s", "iperf3, 0")}
    assert link.notes == ()


LOSSY_PING = """PING b (203.0.113.9) 56(84) bytes of data.
{counts}
rtt min/avg/max/mdev = 60.204/67.310/181.662/14.820 ms
"""


@pytest.mark.parametrize(
    ("text", "loss", "jitter"),
    [
        (
            LOSSY_PING.format(counts="300 packets transmitted, 273 received, 9% packet loss, time 299402ms"),
            0.09,
            "14.82 ms",
        ),
        (
            LOSSY_PING.format(counts="300 packets transmitted, 273 received, +4 errors, 9% packet loss, time 9ms"),
            0.09,
            "14.82 ms",
        ),
        (
            LOSSY_PING.format(counts="300 Pakete übertragen, 273 empfangen, 9% packet loss, time 299402ms"),
            0.09,
            "14.82 ms",
        ),
        (LOSSY_PING.format(counts="8 packets transmitted, 7 packets received, 12.5% packet loss"), 0.125, "14.82 ms"),
        (json.dumps({"report": {"hubs": [LAST_HOP | {"Loss%": 9.0, "StDev": 14.82}]}}), 0.09, "14.82 ms"),
        (iperf3(end=UDP_END, protocol="UDP", target_bitrate=10**9), 0.015, "2 ms"),
        (PING, None, None),  # mdev of 70 us at 20 ms is no jitter
    ],
)
def test_loss_and_jitter_are_kept(text, loss, jitter, tmp_path):
    link = link_from(tmp_path, text)
    assert (link.there.get("loss", (None,))[0], link.there.get("jitter", (None,))[0]) == (loss, jitter)
    job, _ = with_measured_links(load_job(TWO_SITES), [tmp_path / "0"])
    before = load_job(TWO_SITES).cluster.links[0]
    assert job.cluster.links[0].loss == pytest.approx(before.loss if loss is None else loss)
    assert (job.cluster.links[0].jitter_s == before.jitter_s) is (jitter is None)


def test_more_than_the_link_carries_is_no_loss(tmp_path):
    link = link_from(tmp_path, json.dumps(UDP))
    assert link.there == {"bandwidth": ("0.0007131 Gbit/s", "iperf3, 0")}
    assert "32.0% of iperf3's UDP packets were lost: taken as more than the link carries" in link.notes[0]


def ranks(*hosts):
    line = "#  Rank {0:2} Group  0 Pid 147{0} on {1:>10} device  {0} [0x19] NVIDIA H100\n"
    return "".join(line.format(rank, host) for rank, host in enumerate(hosts))


ENDS = " local address: LID {0} QPN 0x0104 PSN 0x1\n GID: {1}\n remote address: LID {2} QPN 0x0105 PSN 0x2\n GID: {3}\n"


@pytest.mark.parametrize(
    "text",
    [
        ranks("x", "x", "x", "x") + NCCL,
        "".join(f"0: {line}\n" for line in (ranks("x", "x") + NCCL).splitlines()),
        iperf3(ends=("127.0.0.1", "127.0.0.1")),
        iperf3(ends=("10.0.0.1", "10.0.0.1")),
        json.dumps(json.loads(iperf3()) | {"start": {"version": "3.9", "connecting_to": {"host": "localhost"}}}),
        "PING localhost (127.0.0.1) 56(84) bytes of data.\n" + MAC_PING,
        json.dumps({"report": {"mtr": {"dst": "localhost"}, "hubs": [LAST_HOP]}}),
        ENDS.format("0000", "::1:2", "0000", "::1:2") + GBITS,
        ENDS.format("0x2a", "", "0x2a", "") + LATENCY,
    ],
)
def test_one_machine_is_no_link_between_sites(text, tmp_path):
    (tmp_path / "x").write_text(text)
    with pytest.raises(InputError, match="on one machine"):
        read_link_test(tmp_path / "x")


@pytest.mark.parametrize(
    "text", [ranks("x", "x", "y", "y") + NCCL, ENDS.format("0000", "::1:2", "0000", "::1:3") + GBITS]
)
def test_two_machines_are_a_link(text, tmp_path):
    link = link_from(tmp_path, text)
    assert "bandwidth" in link.there
    assert link.notes == ()


def test_hosts_that_are_not_told_are_said_to_be(tmp_path):
    assert "does not say its hosts" in link_from(tmp_path, NCCL).notes[0]


@pytest.mark.parametrize(
    "data",
    [
        {"start": 2435, "end": 437, "the": 1169},
        {"start": {"line": 1}, "end": {"line": 9}},
        {"start": "2024-01-01", "end": "2024-01-02", "error": None},
        {"report": {"hubs": 3}},
        {"report": {"hubs": [{"name": "x"}]}},
    ],
)
def test_a_key_or_two_make_no_test_of_a_link(data, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(data))
    assert read_link_test(tmp_path / "x.json") is None


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
        assert (link.latency_s, link.bandwidth_bytes_per_s) == pytest.approx((10.005e-3, 9.4e9 / 8))


def test_other_files_are_refused_as_links(tmp_path):
    (tmp_path / "x").write_text("hello")
    with pytest.raises(InputError, match="no output of iperf3"):
        with_measured_links(load_job(TWO_SITES), [tmp_path / "x"])


def test_measurements_of_one_link_are_refused_for_several(tmp_path):
    (tmp_path / "ping").write_text(PING)
    three = TWO_SITES.with_name("three_sites_asymmetric.toml")
    with pytest.raises(InputError, match="write the figures into cluster"):
        with_measured_links(load_job(three), [tmp_path / "ping"])
