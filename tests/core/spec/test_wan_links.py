"""Keys that `farpipe wan` needs of a file: queue, loss and jitter of links, and clusters without a job."""

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import load_cluster, parse_job
from job_files import PLAIN, changed

LATENCY = 'latency = "6 ms"\n'


def links(*lines):
    return parse_job(changed((LATENCY, LATENCY + "".join(f"{line}\n" for line in lines)))).cluster.links


def test_without_a_word_nothing_disturbs_a_link():
    assert {(link.queue_bytes, link.loss, link.jitter_s) for link in links()} == {(None, 0.0, 0.0)}


def test_queue_loss_and_jitter_count_for_both_directions():
    found = links('queue = "2 MB"', "loss = 0.001", 'jitter = "2 ms"')
    assert [(link.queue_bytes, link.loss, link.jitter_s) for link in found] == [(2e6, 0.001, 0.002)] * 2


def test_a_queue_in_time_is_what_the_link_carries_meanwhile():
    assert links('queue = "20 ms"')[0].queue_bytes == 0.020 * 100e9 / 8


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("loss = 1", "loss: must be less than 1, found 1"),
        ('queue = "2 Mbit/s"', "queue: expected bytes or a time, more than zero"),
        ('queue = "0 B"', "queue: expected bytes or a time, more than zero"),
        ('jitter = "2"', "jitter: expected a quantity with its unit"),
    ],
)
def test_what_makes_no_sense_is_told_with_its_place(line, words):
    with pytest.raises(InputError, match=rf"job.toml: cluster.links\[0\].{words}"):
        links(line)


def test_a_cluster_is_read_from_a_job_or_from_a_file_of_its_own(tmp_path):
    (tmp_path / "job.toml").write_text(PLAIN)
    alone = PLAIN[PLAIN.index("[[cluster.sites]]") : PLAIN.index("[layout]")]
    (tmp_path / "cluster.toml").write_text(alone)
    assert load_cluster(tmp_path / "cluster.toml") == load_cluster(tmp_path / "job.toml") == parse_job(PLAIN).cluster


def test_a_mistake_in_a_cluster_file_is_told_with_its_place(tmp_path):
    (tmp_path / "cluster.toml").write_text('[[cluster.sites]]\nname = "zurich"\ndevice = "h101"\nnum_devices = 1\n')
    with pytest.raises(InputError, match=r"cluster\.toml: cluster\.sites\[0\]\.device"):
        load_cluster(tmp_path / "cluster.toml")
