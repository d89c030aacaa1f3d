"""Sites for tests: orders of small trainings, a Slurm of two partitions, sshd in a network namespace each."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.service.launchers import launcher_of
from farpipe.service.order import Order
from job_files import SMALL_MODEL

SITES = ("zurich", "lugano")
JOB = (
    SMALL_MODEL
    + """
[training]
sequence_length = 16
global_batch = 8
microbatch_size = 2
precision = "fp32"
num_steps = 10
checkpoint_every_steps = {every}
checkpoint_every_minutes = 0
[layout]
pipeline = 2
[[cluster.sites]]
name = "anywhere"
device = "cpu"
num_devices = 2
"""
)
NODES = {"zurich": "s1", "lugano": "s2"}


def part(sites):
    """Two devices, at one site or at two."""
    links = [
        SiteLink(source=a, target=b, latency_s=0.001, bandwidth_bytes_per_s=1e9) for a in sites for b in sites if a != b
    ]
    return Cluster(sites=tuple(preset_site(name, "cpu", 2 // len(sites)) for name in sites), links=tuple(links))


def orders(root, sites, every=0):
    """Makes orders at `sites`, as `check_launcher` wants them."""

    def order(key, num_steps, resume=None):
        folder = root / key.job / str(key.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "order.json").exists():
            made = Order(
                job=JOB.format(every=every),
                num_steps=num_steps,
                part=part(sites),
                layout=None,
                quoted_s=1.0,
                resume=resume,
            )
            made.save(folder / "order.json")
        return folder, {site: 2 // len(sites) for site in sites}

    return order


def until(is_reached, limit_s=240.0):
    """The first true answer."""
    deadline_s = time.monotonic() + limit_s
    while not (found := is_reached()):
        assert time.monotonic() < deadline_s, "not reached"
        time.sleep(0.3)
    return found


def here(root, sites=SITES):
    """A launcher of sites that are processes of this machine."""
    return launcher_of("sites", root, {site: {} for site in sites})


def kill_rank(folder, rank):
    """Kill the process of a rank of the attempt in `folder`, and nobody else."""
    run_dir = str(folder / "run").encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, env = (process / "cmdline").read_bytes(), (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if run_dir in words.split(b"\0") and f"RANK={rank}".encode() in env:
            os.kill(int(process.name), signal.SIGKILL)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class SlurmCluster:
    """slurmctld, munged and a slurmd for each of two partitions, all of this test's."""

    def __init__(self, root, stack):
        self.root, self.conf, self.daemons = root, root / "slurm.conf", {}
        self.stack = stack
        munge = root / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(b"k" * 64)
        (munge / "key").chmod(0o400)
        shutil.chown(munge, "munge", "munge")
        shutil.chown(munge / "key", "munge", "munge")
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self.run("munged", "setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--foreground",
                 *files, f"--socket={munge / 'socket'}")  # fmt: skip
        until((munge / "socket").exists, 20)
        self.conf.write_text(self.settings())
        for name in ("state", "log", *(f"spool-{node}" for node in NODES.values())):
            (root / name).mkdir()
        self.run("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES.values():
            self.run(node, "slurmd", "-D", "-N", node)
        until(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"], 60)

    def settings(self):
        host, nodes = socket.gethostname().partition(".")[0], []
        for site, node in NODES.items():
            nodes += [f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 State=UNKNOWN"]
            nodes += [f"PartitionName={site} Nodes={node} State=UP"]
        lines = f"""ClusterName=farpipe
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={self.root}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmctldPort={free_port()}
SlurmctldPidFile={self.root}/slurmctld.pid
SlurmdPidFile={self.root}/slurmd-%n.pid
SlurmdSpoolDir={self.root}/spool-%n
StateSaveLocation={self.root}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
KillWait=5
SlurmdParameters=config_overrides"""
        return "\n".join([*lines.splitlines(), *nodes, ""])

    def run(self, name, *argv):
        log = (self.root / f"{name}.log").open("ab")
        env = {"SLURM_CONF": str(self.conf), "PATH": PATH}
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
        self.daemons[name] = process
        self.stack.callback(end, process)

    def ask(self, *argv):
        env = {"SLURM_CONF": str(self.conf), "PATH": PATH}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False).stdout


PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def end(process):
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def slurm_cluster():
    """A Slurm of two partitions with the names of the sites, a node each."""
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        root.chmod(0o755)
        yield SlurmCluster(root, stack)


class RayCluster:
    """A real Ray, by the program `ray`: a head, and a node for each site with a label of its own."""

    def __init__(self, ray, root, stack):
        self.ray, self.root, self.stack = ray, root, stack
        self.port, self.dashboard = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.dashboard}"
        head = ("--head", f"--port={self.port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}")
        self.run("head", *head, f"--temp-dir={root}", "--num-cpus=0")
        until(lambda: "Ray runtime started" in self.log("head"), 120)
        address = next(word for word in self.log("head").split("'") if word.endswith(f":{self.port}"))
        for site in SITES:
            self.run(site, f"--address={address}", "--num-cpus=8", f"--labels=farpipe.io/site={site}")
            until(lambda site=site: "Ray runtime started" in self.log(site), 120)

    def jobs(self, words):
        """Jobs with these words in what they run."""
        found = httpx.get(f"{self.url}/api/jobs/", trust_env=False).json()
        return [job for job in found if words in f"{job['entrypoint']} "]

    def log(self, name):
        return (self.root / f"{name}.log").read_text()

    def run(self, name, *options):
        """A part of it in the foreground: what it starts ends with it."""
        argv = [self.ray, "start", "--block", "--object-store-memory=80000000", "--disable-usage-stats", *options]
        env = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path)), "NO_COLOR": "1"}
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.stack.callback(end, process)


class Sshd:
    """A site behind a link of its own: an sshd in a network namespace, with a forced command."""

    def __init__(self, site, number, root, folder, stack):
        self.name, self.folder, self.host = f"fp{number}{site[:4]}", folder, f"10.77.{number}.2"
        folder.mkdir()
        self.outer, inner = f"v{self.name}", f"w{self.name}"
        run("ip", "netns", "add", self.name)
        stack.callback(run, "ip", "netns", "del", self.name, check=False)
        run("ip", "link", "add", self.outer, "type", "veth", "peer", "name", inner)
        stack.callback(run, "ip", "link", "del", self.outer, check=False)
        run("ip", "link", "set", inner, "netns", self.name)
        run("ip", "addr", "add", f"10.77.{number}.1/24", "dev", self.outer)
        run("ip", "link", "set", self.outer, "up")
        inside = ("ip", "netns", "exec", self.name)
        for words in (
            ("addr", "add", f"{self.host}/24", "dev", inner),
            ("link", "set", inner, "up"),
            ("link", "set", "lo", "up"),
        ):
            run(*inside, "ip", *words)
        for name in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        (folder / "site.toml").write_text(f'site = "{site}"\nroot = "{root}"\n[rules]\nhost = "{self.host}"\n')
        env = " ".join(f"{key}={value}" for key, value in (("PYTHONPATH", ":".join(filter(None, sys.path))),))
        command = f"env {env} {sys.executable} -m farpipe.service.door {folder}/site.toml"
        (folder / "keys").write_text(f'restrict,command="{command}" {(folder / "user.pub").read_text()}')
        key = (folder / "host.pub").read_text()
        (folder / "known").write_text(f"{self.host} {key}")
        (folder / "sshd.conf").write_text(
            f"ListenAddress {self.host}\nHostKey {folder}/host\nPidFile none\nAuthorizedKeysFile {folder}/keys\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nAllowUsers root\nPermitRootLogin yes\n"
        )
        self.config = folder / "ssh.conf"
        self.config.write_text(
            f"User root\nIdentityFile {folder}/user\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        log = (folder / "log").open("ab")
        sshd = subprocess.Popen([*inside, "/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd.conf")], stderr=log)
        log.close()
        stack.callback(end, sshd)

    def link(self, state):
        """Take the link to the site ``down``, or ``up``."""
        run("ip", "link", "set", self.outer, state)


def run(*argv, check=True):
    subprocess.run(argv, check=check, capture_output=True, timeout=30)
