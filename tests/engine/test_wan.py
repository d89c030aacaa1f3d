"""Ranks in network namespaces: what is planned is what runs over the kernel's own TCP."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Transfer
from farpipe.engine.launch.launcher import launch
from farpipe.engine.launch.run import run
from farpipe.engine.links import Wan, links_of_problem, state
from farpipe.engine.run_spec import RunSpec
from forked import WITH_FORKS
from job_files import cluster_text
from waiting import wait_until
from wans import both_ways, free_name, needs_wan

pytestmark = [needs_wan, pytest.mark.slow]

SITES = ("west", "west", "east", "east")

WHERE = """
import os, socket
print(socket.gethostbyname("west"), os.environ["MASTER_ADDR"], sorted(os.listdir("/sys/class/net")))
if os.environ["RANK"] == "0":
    listener = socket.socket(fileno=int(os.environ["FARPIPE_MASTER_LISTEN_FD"]))
    listener.accept()[0].sendall(b"hello")
else:
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    assert socket.create_connection(address, timeout=20).recv(5) == b"hello"
"""


@pytest.fixture
def wan():
    with Wan.up(["west", "east"], both_ways(latency_s=0.010), name=free_name()) as up:
        yield up


@pytest.mark.usefixtures("new_processes")
def test_ranks_start_in_their_sites_and_meet_over_the_wan(wan, tmp_path):
    places = [wan.namespaces[site] for site in ("west", "east")]
    launch(lambda _: [sys.executable, "-c", WHERE], 2, log_dir=tmp_path, namespaces=places)
    for rank in range(2):
        words = (tmp_path / f"rank-{rank}.log").read_text().split(maxsplit=2)
        assert words[:2] == ["198.18.0.1", "198.18.0.1"]
        assert "wan0" in words[2]


def test_what_a_rank_dies_of_is_told_as_ever(wan, tmp_path):
    dying = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(RunError, match=r"rank 0 was killed by SIGKILL"):
        launch(lambda _: dying, 1, log_dir=tmp_path, namespaces=[wan.namespaces["west"]])


def problem(num_microbatches=8, latency_s=0.020, mbit_per_s=200, ranks_per_site=2):
    """Two sites, 20 ms forward, 40 ms backward, 0.5 MB messages."""
    num_ranks = 2 * ranks_per_site
    links = {
        name: Link(latency_s=latency_s, bandwidth_bytes_per_s=mbit_per_s * 1e6 / 8)
        for name in ("west>east", "east>west")
    }
    across = Hop(forward=Transfer(link="west>east", bytes=5e5), backward=Transfer(link="east>west", bytes=5e5))
    stages = tuple(Stage(rank=r, forward_s=0.020, input_grad_s=0.020, weight_grad_s=0.020) for r in range(num_ranks))
    hops = tuple(across if r + 1 == ranks_per_site else None for r in range(num_ranks - 1))
    ranks = (Rank(),) * num_ranks
    return Problem(num_microbatches=num_microbatches, ranks=ranks, stages=stages, links=links, hops=hops)


def rehearsal(method, step, sites=SITES):
    schedule = order(method, step)
    settings = {"num_steps": 4, "device": "sleep", "emulate_links": False}
    return RunSpec.bare(problem=step, schedule=schedule, sites=sites, **settings)


@pytest.mark.slow
@pytest.mark.alone
def test_a_step_over_the_kernels_tcp_takes_about_as_long_as_predicted(tmp_path):
    """The exact figures are in benchmarks/engine/wan_prediction.py; here nobody knows what else the machine does."""
    step = problem()
    spec = rehearsal("1f1b", step)
    with Wan.up(["west", "east"], links_of_problem(step), name=free_name()) as up:
        measured_s = run(spec, tmp_path / "run", wan=up).makespan_s
        passed = up.status()["links"]["west>east"]["bytes"]
    predicted_s = simulate(step, spec.plan.schedule).makespan_s
    assert 0.97 * predicted_s < measured_s < 1.5 * predicted_s
    assert passed > 4 * 8 * 5e5, "the messages went around the WAN"


@pytest.mark.slow
@pytest.mark.alone
def test_a_longer_way_makes_a_step_longer(tmp_path):
    """The prediction is for 20 ms; the WAN has 80 ms: every message is 60 ms later."""
    step = problem(num_microbatches=2, ranks_per_site=1)
    spec = rehearsal("gpipe", step, sites=("west", "east"))
    with Wan.up(["west", "east"], links_of_problem(problem(latency_s=0.080)), name=free_name()) as up:
        measured_s = run(spec, tmp_path / "run", wan=up).makespan_s
    assert measured_s > simulate(step, spec.plan.schedule).makespan_s + 0.06


def test_a_wan_of_other_sites_is_refused(wan, tmp_path):
    spec = rehearsal("1f1b", problem(), sites=("west", "west", "south", "south"))
    with pytest.raises(InputError, match="has no site 'south', only west, east"):
        run(spec, tmp_path / "run", wan=wan)


JOB = f"""\
[model]
num_layers = 2
hidden = 32
num_heads = 2
ffn_hidden = 64
vocab_size = 256

[training]
sequence_length = 32
global_batch = 4
microbatch_size = 1
precision = "fp32"

{cluster_text()}
[layout]
pipeline = 2
sites = ["zurich", "lugano"]
"""


@pytest.fixture
def train(tmp_path):
    """`train(*options)`: ``farpipe train --wan`` as a process."""
    (tmp_path / "job.toml").write_text(JOB)
    command = [sys.executable, WITH_FORKS, "-m", "farpipe", "train", "job.toml", "--wan", "--run-dir", "run"]

    def start(*options):
        return subprocess.Popen(
            [*command, *options], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


SAYS_ITS_OPTIONS = """
import pathlib, ssl, stat, sys
from farpipe.engine.figures.metrics import SUMMARY_NAME
options = sys.argv[sys.argv.index("--host") + 2:]
if "--certs" in options:
    folder = pathlib.Path(options[1])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    options += sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
print(*options)
sys.exit(6)
"""


@pytest.mark.parametrize("allow_plaintext", [False, True])
def test_over_a_wan_ranks_get_certificates_that_are_gone_afterwards(wan, tmp_path, allow_plaintext):
    (tmp_path / "rank.py").write_text(SAYS_ITS_OPTIONS)
    with pytest.raises(RunError):
        run(
            rehearsal("1f1b", problem()),
            tmp_path / "run",
            wan=wan,
            allow_plaintext=allow_plaintext,
            rank_program=[str(tmp_path / "rank.py")],
        )
    options = (tmp_path / "run" / "logs" / "rank-0.log").read_text().split()
    if allow_plaintext:
        assert options == ["--allow-plaintext"]
        return
    certs = [f"{site}{name}" for site in ("east", "west") for name in ("", "/authority.pem", "/site.key", "/site.pem")]
    assert (options[0], options[2:]) == ("--certs", sorted(["authority.pem", *certs]))
    assert not Path(options[1]).exists()
    assert Path(options[1]).parent == wan.folder, "where what kill -9 leaves goes with the WAN"


def test_without_the_library_for_certificates_both_remedies_are_named(wan, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    words = r"certificates need the cryptography library: pip install 'farpipe\[secure\]'; or, with --allow-plaintext"
    with pytest.raises(InputError, match=words):
        run(rehearsal("1f1b", problem()), tmp_path / "run", wan=wan)
    assert not [*wan.folder.glob("certs-*")]


def test_the_end_of_the_wan_is_reported_not_the_ranks_that_it_costs(wan, tmp_path):
    kill = f"import os; os.kill({state.forwarder_pid(wan.name)}, 9); raise SystemExit(6)"
    (tmp_path / "rank.py").write_text(kill)
    with pytest.raises(RunError, match="carries nothing any more"):
        run(rehearsal("1f1b", problem()), tmp_path / "run", wan=wan, rank_program=[str(tmp_path / "rank.py")])


def wan_of(process):
    """Whatever there is of the WAN that a process has made for itself."""
    return [name for name in state.names() if name == f"run{process.pid}"]


@pytest.mark.slow
def test_train_over_a_wan_of_its_own_trains_and_leaves_nothing(train, tmp_path):
    process = train("--steps", "4", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["last_loss"] < 6
    assert summary["makespan_s"] > 0.06, "forward and backward each cross the WAN once"
    assert wan_of(process) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_when_training_is_broken_off_its_wan_goes_as_well(train, tmp_path, number):
    process = train("--steps", "100000", "--device", "sleep")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_bytes()), "a step was done")
    assert process.poll() is None, process.stderr.read()
    (name,) = wan_of(process)
    assert [*state.folder_of(name).rglob("site.key")], "they have to go as well"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGKILL)
    wait_until(lambda: wan_of(process) == [], "the WAN was gone")
