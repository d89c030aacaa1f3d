"""The network namespaces of a WAN: one for each site, with an address, routes, names and TCP settings of its own."""

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Final

from farpipe.core.errors import RunError, UsageError
from farpipe.engine.links.tun import DEVICE, INTERFACE, MTU_BYTES, in_namespace

NETWORK: Final = IPv4Network("198.18.0.0/15")
"""Addresses for tests of networks (RFC 2544), so that no site's is anybody's real one."""
PREFIX: Final = "farpipe-"
COMMAND_LIMIT_S: Final = 10.0
_CAPABILITIES: Final = 1 << 12 | 1 << 21
"""CAP_NET_ADMIN and CAP_SYS_ADMIN, see capabilities(7)."""
_NAMESPACES: Final = Path("/run/netns")
_FILES: Final = Path("/etc/netns")
_QUEUE_BURSTS: Final = 4096
_SYSCTLS: Final = {
    "ipv4/tcp_slow_start_after_idle": "0",  # a pipeline pauses between steps
    "ipv4/tcp_no_metrics_save": "1",  # a link that was changed is not what earlier connections learnt of it
    "ipv4/tcp_rmem": "4096 131072 67108864",  # one stream can fill 1 Gbit/s at 200 ms, as hosts for long ways are set
    "ipv4/tcp_wmem": "4096 131072 67108864",
    "ipv6/conf/all/disable_ipv6": "1",
}


@dataclass(frozen=True)
class Namespace:
    """Network of a site's processes: the name of a network namespace and its address on the WAN."""

    name: str
    address: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs inside; the process that is started becomes that of `argv`."""
        return ["ip", "netns", "exec", self.name, *argv]

    def listen(self, port: int) -> socket.socket:
        """A socket that listens inside, made from outside; OSError when the port is taken."""
        return in_namespace(self.name, lambda: socket.create_server((self.address, port)))


def check_possible() -> None:
    """UsageError with what to do instead where this machine or user can't have namespaces."""
    hint = "without it, links can be emulated inside the transport: `farpipe train JOB` without --wan"
    if not _has_capabilities():
        raise UsageError(
            "a WAN of network namespaces needs root: call farpipe with sudo, or start the container with --cap-add "
            f"NET_ADMIN --cap-add SYS_ADMIN; {hint}"
        )
    if shutil.which("ip") is None:
        raise UsageError(f"a WAN of network namespaces needs the command `ip`: install iproute2; {hint}")
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise UsageError(
            f"a WAN of network namespaces needs {DEVICE}: load the kernel module tun, or start the container with "
            f"--device {DEVICE}; {hint}"
        )


def _has_capabilities() -> bool:
    """True if this process may make namespaces and interfaces."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return effective & _CAPABILITIES == _CAPABILITIES


def namespaces_of(wan: str, sites: Sequence[str]) -> dict[str, Namespace]:
    """The namespace of every site; the same whenever it is asked for."""
    return {
        site: Namespace(f"{PREFIX}{wan}-{site}", str(IPv4Address(int(NETWORK.network_address) + number)))
        for number, site in enumerate(sites, 1)
    }


def create(namespaces: Mapping[str, Namespace]) -> None:
    """Make them, empty but for loopback, each knowing the sites by name."""
    known = "".join(f"{namespace.address} {site}\n" for site, namespace in namespaces.items())
    for namespace in namespaces.values():
        run_ip("netns", "add", namespace.name)
        run_ip("-n", namespace.name, "link", "set", "lo", "up")
        files = _FILES / namespace.name  # `ip netns exec` puts them over those of /etc
        files.mkdir(parents=True)
        # A look-up of a name that is not here would wait for servers that can't be reached.
        (files / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n{known}")
        (files / "resolv.conf").write_text("options timeout:1 attempts:1\n")


def connect(namespace: Namespace, reachable: Sequence[Namespace]) -> None:
    """Give the TUN in `namespace` its address and routes; what is not `reachable` is answered with an error."""
    lines = [
        f"address add {namespace.address}/32 dev {INTERFACE}",
        f"link set {INTERFACE} mtu {MTU_BYTES} txqueuelen {_QUEUE_BURSTS} up",
        *(f"route add {other.address}/32 dev {INTERFACE} src {namespace.address}" for other in reachable),
        "route add unreachable default",
    ]
    run_ip("-n", namespace.name, "-batch", "-", text="\n".join(lines) + "\n")
    in_namespace(namespace.name, _set_sysctls)


def _set_sysctls() -> None:
    for name, value in _SYSCTLS.items():
        path = Path("/proc/sys/net", name)
        if path.exists():
            path.write_text(value)


def existing(wan: str) -> list[str]:
    """The names of the namespaces, and of what else is left of them, that belong to `wan`."""
    pattern = f"{PREFIX}{wan}-*"
    return sorted({path.name for folder in (_NAMESPACES, _FILES) for path in folder.glob(pattern)})


def processes(name: str) -> list[int]:
    """The processes in a namespace."""
    if not (_NAMESPACES / name).exists():
        return []
    return [int(word) for word in run_ip("netns", "pids", name).split()]


def remove(name: str) -> None:
    """Remove a namespace and its files, whatever is left of them."""
    if (_NAMESPACES / name).exists():
        run_ip("netns", "delete", name)
    shutil.rmtree(_FILES / name, ignore_errors=True)


def run_ip(*arguments: str, text: str = "") -> str:
    """Return the output of the command `ip`; RunError with its words if it fails."""
    command = ["ip", *arguments]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"{' '.join(command)}: no answer within {COMMAND_LIMIT_S:g} s") from None
    if done.returncode:
        raise RunError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
