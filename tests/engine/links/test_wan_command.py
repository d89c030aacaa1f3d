"""``farpipe wan`` as people type it."""

import json
import subprocess
import sys

import pytest

from farpipe.engine.links import state
from job_files import cluster_text
from waiting import LIMIT_S
from wans import free_name, needs_wan

pytestmark = [needs_wan, pytest.mark.slow]

CLUSTER = f"""\
{cluster_text(latency="5 ms")}
queue = "20 ms"
loss = 0.25
"""


def farpipe(*arguments):
    command = [sys.executable, "-m", "farpipe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture
def name(tmp_path):
    """The name of a WAN like CLUSTER."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    own = free_name()
    up = farpipe("wan", "--name", own, "up", tmp_path / "cluster.toml")
    assert (up.returncode, up.stderr) == (0, "")
    assert f"lugano: 198.18.0.2   ip netns exec farpipe-{own}-lugano COMMAND" in up.stdout
    yield own
    state.take_down(own)


def links(name):
    return json.loads(farpipe("wan", "--name", name, "status", "--json").stdout)["links"]


def test_a_wan_stays_can_be_changed_and_goes(name):
    assert {link: known["queue_limit_bytes"] for link, known in links(name).items()} == {
        "zurich>lugano": 500_000,
        "lugano>zurich": 500_000,
    }
    assert links(name)["zurich>lugano"]["loss"] == 0.25
    new = ("latency=60 ms", "bandwidth=50 Mbit/s", "jitter=2 ms", "loss=0")
    for command in (("set", "zurich>lugano", *new), ("cut", "lugano<>zurich"), ("mend", "zurich>lugano")):
        done = farpipe("wan", "--name", name, *command)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    there, back = links(name).values()
    assert (there["latency_s"], there["bandwidth_bytes_per_s"], there["jitter_s"]) == (0.060, 6.25e6, 0.002)
    assert (there["loss"], there["cut"]) == (0, False)
    assert (back["latency_s"], back["loss"], back["cut"]) == (0.005, 0.25, True)
    shown = farpipe("wan", "--name", name, "status").stdout
    assert "lugano>zurich (cut)" in shown
    for _ in range(2):
        done = farpipe("wan", "--name", name, "down")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    gone = farpipe("wan", "--name", name, "status")
    assert gone.returncode == 3
    assert f"there is no WAN called '{name}'" in gone.stderr
    assert "farpipe wan up" in gone.stderr


def test_a_second_wan_of_that_name_is_refused(name, tmp_path):
    again = farpipe("wan", "--name", name, "up", tmp_path / "cluster.toml")
    assert again.returncode == 3
    assert f"there is a WAN called '{name}' already; take it down with `farpipe wan --name {name} down`" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("set", "zurich>lugano", "latenzy=5 ms"), 2, "did you mean 'latency'?"),
        (("set", "zurich>lugano", "latency=5"), 3, 'latency: expected a quantity with its unit such as "60 ms"'),
        (("set", "zurich>lugano", "loss=1"), 3, "loss: must be less than 1"),
        (("cut", "zurich>lugan"), 3, "did you mean 'zurich>lugano'"),
    ],
)
def test_mistakes_are_told(name, arguments, exit_code, words):
    done = farpipe("wan", "--name", name, *arguments)
    assert done.returncode == exit_code
    assert words in done.stderr


def test_a_name_that_can_not_be_one_is_told():
    done = farpipe("wan", "--name", "../x", "down")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a WAN's name is up to 30 letters, digits and '_'" in done.stderr
