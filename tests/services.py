"""Services for tests: in a thread, around a launcher without processes; and as a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import uvicorn

from farpipe.core.spec import Cluster, preset_site
from farpipe.core.spec.cluster import SiteLink
from farpipe.fleet.policies import POLICIES
from farpipe.fleet.quotes import StopCosts
from farpipe.fleet.state import first_state
from farpipe.service.app import application
from farpipe.service.auth import TOKEN_NAME, make_first_token, new_token
from farpipe.service.instance import Instance
from farpipe.service.launcher import Seen
from farpipe.service.store import Store
from farpipe.testing.policies import SimpleQuotes
from job_files import SMALL_MODEL

SITES = ("zurich", "lugano")
CLUSTER = Cluster(
    sites=tuple(preset_site(name, "cpu", 8) for name in SITES),
    links=tuple(
        SiteLink(source=a, target=b, latency_s=0.001, bandwidth_bytes_per_s=1e9) for a in SITES for b in SITES if a != b
    ),
)
JOB = (
    SMALL_MODEL
    + """
[training]
sequence_length = 16
global_batch = 8
microbatch_size = 2
precision = "fp32"
num_steps = {num_steps}
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
"""A real job of two ranks, of some seconds."""
FLEET = """
[clock]
start = "2026-11-30T00:00:00"
[[sites]]
name = "zurich"
device = "cpu"
num_devices = 2
[[sites]]
name = "lugano"
device = "cpu"
num_devices = 2
[[links]]
between = ["zurich", "lugano"]
latency = "1 ms"
bandwidth = "1 GB/s"
[stops]
restart_s = 5
stop_s = 10
first_pause_s = 0
"""
LIMIT_S = 60.0


def job_toml(num_steps=4, every=0):
    return JOB.format(num_steps=num_steps, every=every)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def until(reached, limit_s=LIMIT_S, said=""):
    """What `reached` gives once that is something; AssertionError after the limit."""
    end_s = time.monotonic() + limit_s
    while not (found := reached()):
        assert time.monotonic() < end_s, said() if callable(said) else said
        time.sleep(0.05)
    return found


class Attempts:
    """A launcher whose attempts run, and do what the test says."""

    def __init__(self):
        self.seen, self.files, self.started, self.told = {}, {}, [], []

    def start(self, key, folder, where):
        self.started.append(key)
        self.seen.setdefault(key, Seen("alive"))

    def site_events(self, up, now_s):
        return []

    def look(self, keys):
        return {key: self.seen.get(key, Seen("absent")) for key in keys}

    def stop(self, key, leave_s):
        self.told.append(key)
        self.seen[key] = Seen("ended", 75) if key in self.seen else Seen("absent")

    def read(self, key, file, offset):
        return self.files.get((key, file), b"")[offset:]


class Asking:
    """A client of a service at `url` with one token."""

    def __init__(self, url, token):
        self.http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=30, trust_env=False
        )

    def __call__(self, method, path, body=None, **query):
        return self.http.request(method, f"/v1/{path}", json=body, params=query)

    def submit(self, name, text=None, **more):
        return self("POST", "jobs", {"name": name, "job": text or job_toml(), **more})


class Threaded:
    """A service in a thread of this process, on a real port."""

    def __init__(self, root, database=None, launcher=None, owner="one", quotes=None, cluster=CLUSTER, policy="fcfs"):
        self.root, self.launcher, self.clients = Path(root), launcher or Attempts(), []
        self.store = Store(database or f"sqlite:///{root}/fleet.sqlite")
        state = first_state(
            cluster, POLICIES[policy], quotes or SimpleQuotes(), StopCosts(stop_s=30.0, first_pause_s=0.0)
        )
        runs = self.root / "runs"
        runs.mkdir(exist_ok=True)
        self.instance = Instance(
            self.store,
            state,
            cluster,
            self.launcher,
            runs,
            owner,
            begin=lambda store: make_first_token(store, self.root),
        )
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            application(self.instance), port=self.port, log_config=None, access_log=False, timeout_graceful_shutdown=2
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until(self.is_ready, said="the service does not get ready")

    def is_ready(self):
        try:
            return httpx.get(f"{self.url}/ready", trust_env=False).is_success
        except httpx.TransportError:
            return False

    def operator(self):
        return self.asking_with((self.root / TOKEN_NAME).read_text().strip())

    def asking(self, role, tenant, days=1):
        token, row = new_token(role, tenant, days)
        self.store.add_token(row)
        return self.asking_with(token)

    def asking_with(self, token):
        self.clients.append(Asking(self.url, token))
        return self.clients[-1]

    def close(self):
        for client in self.clients:
            client.http.close()
        self.server.should_exit = True
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        self.store.close()


class Spawned:
    """A service as a process of its own, by the command or by a program of a test in its place."""

    def __init__(
        self, root, *more, port=None, program=("-m", "farpipe"), env: Mapping[str, str] | None = None, fleet=FLEET
    ):
        self.root, self.port = Path(root), port or free_port()
        self.root.mkdir(exist_ok=True)
        self.fleet = self.root / "fleet.toml"
        self.fleet.write_text(fleet)
        argv = [
            sys.executable,
            *program,
            "fleet",
            "serve",
            self.fleet,
            "--run-dir",
            self.root,
            "--port",
            str(self.port),
        ]
        self.argv, self.env = [*map(str, argv), *more], {**os.environ, **(env or {})}
        self.url, self.log = f"http://127.0.0.1:{self.port}", self.root / f"service-{self.port}.log"
        self.process = None
        self.start()

    def start(self):
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.argv, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def has_died(self):
        return self.process.poll() is not None

    def is_ready(self):
        if self.has_died():
            return False
        try:
            return httpx.get(f"{self.url}/ready", trust_env=False, timeout=5).is_success
        except httpx.TransportError:
            return False

    def until_ready(self):
        until(lambda: self.is_ready() or self.has_died(), 120.0, self.log.read_text)
        return not self.has_died()

    def operator(self):
        return Asking(self.url, (self.root / TOKEN_NAME).read_text().strip())

    def kill(self, how=signal.SIGKILL):
        if not self.has_died():
            self.process.send_signal(how)
        return self.process.wait(60)
