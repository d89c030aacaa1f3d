"""WANs of network namespaces, with the kernel's TCP over them. Timings have a sharp lower bound, for nothing travels
faster than the link, and a generous upper one, for the machine may be busy."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.engine.links import Wan, namespace, state
from farpipe.engine.links.tun import in_namespace
from waiting import LIMIT_S, wait_until
from wans import both_ways, connection, free_name, link, needs_wan, one_way_s, python

pytestmark = [needs_wan, pytest.mark.slow]


@pytest.fixture
def wan():
    """west to east 10 ms and 200 Mbit/s, back 40 ms and 50 Mbit/s."""
    with Wan.up(
        ["west", "east"], [link("west", "east", 0.010), link("east", "west", 0.040, 50)], name=free_name()
    ) as up:
        yield up
    assert left(up.name) == []


def left(name):
    """Whatever there is of a WAN."""
    found = [path for path in (state.folder_of(name),) if path.exists()]
    return found + namespace.existing(name) + [pid for pid in [state.forwarder_pid(name)] if pid]


def transfer_s(sender, receiver, num_bytes):
    """Seconds until the last of `num_bytes` is there, as it was sent."""
    sent, received = os.urandom(num_bytes), b""
    writer = threading.Thread(target=sender.sendall, args=(sent,))
    start_s = time.monotonic()
    writer.start()
    while len(received) < num_bytes:
        received += receiver.recv(1 << 20)
    elapsed_s = time.monotonic() - start_s
    writer.join()
    assert received == sent
    return elapsed_s


@pytest.mark.alone
def test_each_direction_has_its_own_delay(wan):
    west, east = connection(wan, "west", "east")
    with west, east:
        assert 0.010 <= one_way_s(west, east) < 0.030
        assert 0.040 <= one_way_s(east, west) < 0.060


def test_each_direction_has_its_own_rate(wan):
    west, east = connection(wan, "west", "east")
    with west, east:
        there_s, back_s = transfer_s(west, east, 2_000_000), transfer_s(east, west, 2_000_000)
    assert 0.080 <= there_s < 60  # slow start takes some round trips; 2 MB take 80 ms of the link
    assert 0.320 <= back_s < 60


@pytest.mark.alone
def test_delay_and_rate_can_be_changed_while_a_connection_lasts(wan):
    west, east = connection(wan, "west", "east")
    with west, east:
        wan.set("west>east", latency_s=0.080, bandwidth_bytes_per_s=1e6)
        assert 0.080 <= one_way_s(west, east) < 0.110
        assert transfer_s(west, east, 300_000) >= 0.300
        wan.set("west<>east", latency_s=0.001, bandwidth_bytes_per_s=25e6)
        assert one_way_s(west, east) < 0.010
        assert one_way_s(east, west) < 0.010
    assert wan.status()["links"]["west>east"]["latency_s"] == 0.001


def test_a_cut_link_carries_nothing_and_a_mended_one_everything(wan):
    west, east = connection(wan, "west", "east")
    with west, east:
        wan.cut("west<>east")
        west.sendall(b"x")
        east.settimeout(0.3)
        with pytest.raises(TimeoutError):
            east.recv(1)
        status = wan.status()["links"]["west>east"]
        assert status["cut"]
        assert status["dropped_cut"] > 0
        wan.mend("west<>east")
        east.settimeout(LIMIT_S)
        assert east.recv(1) == b"x"  # sent again by the kernel


def test_status_counts_what_passes(wan):
    west, east = connection(wan, "west", "east")
    with west, east:
        transfer_s(west, east, 1_000_000)
    there = wan.status()["links"]["west>east"]
    assert 1_000_000 * 1500 / 1448 <= there["bytes"] < 1_300_000
    assert there["packets"] >= 1_000_000 // 1448
    assert there["dropped_lost"] == there["dropped_cut"] == 0


def test_lost_packets_are_lost_one_by_one_and_the_data_still_arrives(wan):
    wan.set("west<>east", loss=0.02, latency_s=0.001)
    west, east = connection(wan, "west", "east")
    with west, east:
        transfer_s(west, east, 3_000_000)
    there = wan.status()["links"]["west>east"]
    assert 0.005 < there["dropped_lost"] / there["packets"] < 0.05  # of about 2100


def test_a_full_queue_drops(wan):
    wan.set("west>east", queue_bytes=30_000, bandwidth_bytes_per_s=5e5)
    with in_namespace(wan.namespaces["west"].name, lambda: socket.socket(type=socket.SOCK_DGRAM)) as sender:
        for _ in range(100):
            sender.sendto(bytes(1400), (wan.namespaces["east"].address, 9))

    def accounted():
        there = wan.status()["links"]["west>east"]
        return there["dropped_full"] + there["packets"]

    wait_until(lambda: accounted() == 100, "every packet had arrived or was dropped")
    there = wan.status()["links"]["west>east"]
    assert there["dropped_full"] > 50
    assert there["queued_bytes"] == 0


def test_a_site_knows_the_others_and_itself_by_name_at_once(wan):
    code = "import socket; print(*map(socket.gethostbyname, ['west', 'east', 'localhost', socket.gethostname()]))"
    command = wan.namespaces["west"].command(python(code))
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.split() == ["198.18.0.1", "198.18.0.2", "127.0.0.1", "127.0.0.1"]
    failing = (
        "import socket, contextlib, time; start_s = time.monotonic()\n"
        "with contextlib.suppress(OSError): socket.gethostbyname('nowhere.example')\n"
        "print(time.monotonic() - start_s)"
    )
    command = wan.namespaces["west"].command(python(failing))
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert float(done.stdout) < 8  # a resolver that waits for its servers takes ten


@pytest.mark.alone
def test_sites_without_a_link_talk_over_the_site_between_them():
    links = [*both_ways("west", "middle", latency_s=0.010), *both_ways("middle", "east", latency_s=0.010)]
    with Wan.up(["west", "middle", "east"], links, name=free_name()) as up:
        west, east = connection(up, "west", "east")
        with west, east:
            assert 0.020 <= one_way_s(west, east) < 0.050


def test_what_has_no_way_is_refused_at_once():
    with Wan.up(["west", "east", "island"], both_ways(), name=free_name()) as up:
        island = up.namespaces["island"].address
        connect = lambda: socket.create_connection((island, 9), timeout=LIMIT_S)  # noqa: E731
        start_s = time.monotonic()
        with pytest.raises(OSError, match=r"No route to host|Network is unreachable"):
            in_namespace(up.namespaces["west"].name, connect)
        assert time.monotonic() - start_s < LIMIT_S / 2


def test_a_link_without_a_way_back_is_refused():
    with pytest.raises(InputError, match=r"link west>east has no reverse link, .* add a link from 'east' to 'west'"):
        Wan.up(["west", "east"], [link("west", "east")], name=free_name())


def test_a_name_can_not_be_used_twice(wan):
    with pytest.raises(InputError, match=rf"there is a WAN called '{wan.name}' already; .*farpipe wan --name"):
        Wan.up(["west"], [], name=wan.name)
    assert wan.status()["links"]  # the first one is unharmed


def test_orders_that_make_no_sense_are_answered(wan):
    with pytest.raises(InputError, match="no link 'west>eats'; did you mean 'west>east'"):
        wan.cut("west>eats")
    with pytest.raises(InputError, match="loss: must be less than 1, found 1"):
        wan.set("west>east", loss=1)
    with pytest.raises(InputError, match="unknown key; did you mean 'latency_s'"):
        wan.set("west>east", latency=1)
    with pytest.raises(InputError, match="ends can't be changed"):
        wan.set("west>east", target="west")


def test_down_leaves_nothing_after_the_forwarder_was_killed():
    up = Wan.up(["west", "east"], both_ways(), name=free_name(), keep=True)
    try:
        os.kill(state.forwarder_pid(up.name), signal.SIGKILL)
        wait_until(lambda: state.forwarder_pid(up.name) is None, "the forwarder was gone")
        with pytest.raises(RunError, match=f"carries nothing any more.*farpipe wan --name {up.name}"):
            Wan.find(up.name)
        with pytest.raises(RunError, match="does not answer"):
            up.status()
    finally:
        up.down()
    assert left(up.name) == []
    assert state.take_down(up.name) == []  # once more does no harm


@pytest.mark.parametrize("words", [[], ["-m"]])
def test_a_process_that_only_speaks_of_a_forwarder_is_none(words):
    name = free_name()
    spoken = [*words, "farpipe.engine.links.forwarder", state.folder_of(name)]
    command = python("import sys; print('here', flush=True); sys.stdin.read()", *spoken)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"here\n"
        assert state.forwarder_pid(name) is None
        process.stdin.close()


def test_down_leaves_the_processes_inside_and_tells_of_them():
    up = Wan.up(["west"], [], name=free_name())
    with subprocess.Popen(up.namespaces["west"].command(python("import time; time.sleep(60)"))) as process:
        try:
            wait_until(lambda: namespace.processes(up.namespaces["west"].name), "the process was in")
            assert up.down() == [process.pid]
            assert process.poll() is None
        finally:
            process.kill()


OWNER = """
import sys, time
from farpipe.engine.links import Wan
Wan.up(["west", "east"], [], name=sys.argv[1])
print("up", flush=True)
time.sleep(60)
"""


def test_when_its_owner_is_killed_a_wan_goes_as_well():
    name = free_name()
    with subprocess.Popen([sys.executable, "-c", OWNER, name], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "up\n"
        assert left(name)
        owner.kill()
    wait_until(lambda: left(name) == [], "nothing was left")


STARTER = """
import os, sys
from farpipe.engine.links import Wan, wan
start = wan.subprocess.Popen
def start_and_die(*arguments, **options):
    start(*arguments, **options)
    os._exit(0)
wan.subprocess.Popen = start_and_die
Wan.up(["west", "east"], [], name=sys.argv[1], keep=True)
"""


def test_when_its_owner_dies_while_it_starts_nothing_is_left():
    name = free_name()
    subprocess.run([sys.executable, "-c", STARTER, name], check=True, timeout=LIMIT_S)
    wait_until(lambda: left(name) == [], "nothing was left")


def test_a_start_that_fails_says_why_and_leaves_nothing():
    name = free_name()
    namespace.run_ip("netns", "add", f"{namespace.PREFIX}{name}-west")
    try:
        with pytest.raises(InputError, match="there is a WAN called"):
            Wan.up(["west"], [], name=name)
        with pytest.raises(RunError, match=rf"the WAN '{name}y' can't be made: ip netns add farpipe-{name}y-"):
            Wan.up(["west", "\U00010330" * 60], [], name=f"{name}y")
        assert left(f"{name}y") == []
    finally:
        state.take_down(name)
    assert left(name) == []


AS_NOBODY = """
import os
from farpipe.engine.links import namespace
os.setuid(65534)
namespace.check_possible()
"""


def test_without_root_the_message_names_the_remedy():
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, check=False)
    assert "UsageError: a WAN of network namespaces needs root: call farpipe with sudo" in done.stderr
