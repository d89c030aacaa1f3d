"""Meeting of the ranks: every rank says where it listens and learns where the others do."""

import hmac
import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypedDict

from farpipe.core.errors import InputError, RunError
from farpipe.core.units import printable
from farpipe.engine.transport.config import TransportConfig, resolve
from farpipe.engine.transport.health import PeerError
from farpipe.engine.transport.passages import Links

TOKEN_VARIABLE: Final = "FARPIPE_RUN_TOKEN"
_TOKEN_BYTES: Final = 32
_NUMBER_BYTES: Final = 16
_MEETING: Final = "meeting"
_POLL_S: Final = 0.02
LOOK_S: Final = 0.5
"""Time between two looks whether another rank has given up."""
STALE_S: Final = 8.0
"""Time for which a rank that finds a meeting given up waits for another: it may be that of a group before this one."""
GIVING_UP_S: Final = 3.0
"""Time for which a rank that gives up looks for the meeting."""
_MAX_REASON: Final = 2000


class Meeting(Protocol):
    """Interface to bring the ranks of a run together: a `Rendezvous`, or the two sides of a probe."""

    def introduce(self, introduction: str, timeout_s: float) -> list[str]:
        """Hand in where and what this rank is; everybody's introduction by rank, RunError after `timeout_s`."""

    @property
    def token(self) -> bytes:
        """The secret of the run, the same on all ranks; known once they have met."""

    def give_up(self, reason: str) -> None:
        """Tell the others, as far as they can be reached, why this rank does not come."""
        return

    def heard(self) -> str:
        """Reason why another rank has given up, in words with its number; empty: none has."""
        return ""


class Store(Protocol):
    """A key-value store that all ranks reach, such as torch's TCPStore; OSError when it is lost."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class _List(TypedDict):
    """Ranks at a meeting: (number, introduction) by rank, and the token unless it is given from outside."""

    ranks: list[tuple[str, str]]
    token: str
    strangers: list[int]
    """Ranks whose token is not that of rank 0."""


class Rendezvous:
    """A meeting of `world_size` ranks over a key-value store.

    The store may outlive a group of ranks: torchrun's agents keep it, and start other ranks when one has failed or a
    machine comes or goes. What they say in the environment does not separate groups: TORCHELASTIC_RESTART_COUNT does
    not grow when machines change, and then differs between agents. So rank 0 opens a meeting under a new name, the
    others sign in there, each with a number that it has just drawn, and rank 0 closes the list. Whoever finds its
    number in the list knows that all in it are of now; in the list of an earlier group it is not.

        meeting                 name of the newest meeting
        NAME/rank 1             number and introduction of a rank, and what proves its token
        NAME/list               those of all ranks, and the token
        NAME/gave up            number of the first rank that does not come, and why

    `token` is the secret of the run, by which ranks know each other. None: rank 0 makes one and hands it out through
    the store, and whoever can read the store can read it.
    """

    def __init__(self, store: Store, rank: int, world_size: int, token: bytes | None = None) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._token = token
        self._number = secrets.token_hex(_NUMBER_BYTES)
        self._name = ""
        self._looked_s = self._heed_s = 0.0
        self._has_waited = False

    def introduce(self, introduction: str, timeout_s: float) -> list[str]:
        """Hand in where and what this rank is; everybody's introduction by rank.

        RunError naming the ranks that did not come within `timeout_s`, and where these are not `world_size` ranks;
        PeerError as soon as one says why it does not come;
        InputError naming the ranks whose token is another one.
        """
        deadline_s = time.monotonic() + timeout_s
        mine = json.dumps([self._number, introduction, self._proof(self._number)])
        with self._reaching_store():
            text, missing = self._open(mine, deadline_s) if self._rank == 0 else self._sign_in(mine, deadline_s)
        if text is None:
            self._has_waited = True
            raise RunError(f"rank {self._rank} waited {timeout_s:g} s for the others; missing: {_join(missing)}")
        found: _List = json.loads(text)
        if (num_ranks := len(found["ranks"])) != self._world_size:
            raise RunError(
                f"rank {self._rank} is of {self._world_size} ranks and met a group of {num_ranks}; is WORLD_SIZE the "
                "same everywhere?"
            )
        if strangers := found["strangers"]:
            others = _join([f"rank {rank}" for rank in strangers])
            raise InputError(f"{TOKEN_VARIABLE} is not the same for rank 0 and for {others}; set the same at all sites")
        if self._token is None:
            self._token = found["token"].encode()
        return [theirs for _, theirs in found["ranks"]]

    def _proof(self, number: str) -> str:
        """Proof of the token of this rank, for a rank with that number; empty without a token from outside."""
        return "" if self._token is None else hmac.new(self._token, number.encode(), "sha256").hexdigest()

    @property
    def token(self) -> bytes:
        """The secret of this run, the same on all ranks; known once they have met."""
        assert self._token, "the ranks have met"
        return self._token

    def _open(self, mine: str, deadline_s: float) -> tuple[str | None, list[str]]:
        """Rank 0's part: the list, which all have signed, or None and who is missing."""
        name = self._name = secrets.token_hex(_NUMBER_BYTES)
        self._store.set(_MEETING, name)
        others = [f"rank {rank}" for rank in range(1, self._world_size)]
        while missing := [other for other in others if not self._store.check([f"{name}/{other}"])]:
            self._expect_nobody_gave_up()
            if not _wait_before(deadline_s):
                return None, missing
        signed = [mine, *(self._read(f"{name}/{other}") for other in others)]
        token = "" if self._token else secrets.token_hex(_TOKEN_BYTES)
        signatures = [_signature(line) for line in signed]
        strangers = [
            rank
            for rank, (number, _, proof) in enumerate(signatures)
            if number and not hmac.compare_digest(proof.encode(), self._proof(number).encode())
        ]
        ranks = [(number, theirs) for number, theirs, _ in signatures]
        text = json.dumps(_List(ranks=ranks, token=token, strangers=strangers))
        self._store.set(f"{name}/list", text)
        return text, []

    def _sign_in(self, mine: str, deadline_s: float) -> tuple[str | None, list[str]]:
        """Another rank's part. The meeting may be that of an earlier group until rank 0 has opened its own."""
        name = ""
        while True:
            if self._store.check([_MEETING]) and (newest := self._read(_MEETING)) != name:
                name = self._name = newest
                self._heed_s = time.monotonic() + (STALE_S if self.heard() else 0.0)
                self._store.set(f"{name}/rank {self._rank}", mine)
            if name and self._store.check([f"{name}/list"]) and self._number in (text := self._read(f"{name}/list")):
                return text, []
            self._expect_nobody_gave_up()
            if not _wait_before(deadline_s):
                return None, self._missing(name)

    def _missing(self, name: str) -> list[str]:
        """Ranks that have not signed in, as seen by another rank than 0."""
        others = [f"rank {rank}" for rank in range(1, self._world_size)] if name else []
        return [other for other in others if not self._store.check([f"{name}/{other}"])] or ["rank 0"]

    def give_up(self, reason: str) -> None:
        """Tell the others, as far as they can be reached within GIVING_UP_S, why this rank does not come.

        That it has waited in vain itself is no reason.
        """
        if self._has_waited:
            return
        deadline_s = time.monotonic() + GIVING_UP_S
        with suppress(OSError):
            if self._rank == 0 and not self._name:
                self._name = secrets.token_hex(_NUMBER_BYTES)
                self._store.set(_MEETING, self._name)
            while not self._name and _wait_before(deadline_s):
                if self._store.check([_MEETING]):
                    self._name = self._read(_MEETING)
            if self._name and not self._store.check([f"{self._name}/gave up"]):
                self._store.set(f"{self._name}/gave up", json.dumps([self._rank, reason[:_MAX_REASON]]))

    def heard(self) -> str:
        """Reason why another rank has given up, in words with its number; empty: none has, or the store is lost."""
        self._looked_s = time.monotonic()
        with suppress(OSError, ValueError, TypeError):
            if self._name and self._store.check([f"{self._name}/gave up"]):
                rank, reason = json.loads(self._read(f"{self._name}/gave up"))
                if rank != self._rank:
                    return printable(f"rank {int(rank)} gave up: {reason}")
        return ""

    def _expect_nobody_gave_up(self) -> None:
        if time.monotonic() > max(self._looked_s + LOOK_S, self._heed_s) and (reason := self.heard()):
            raise PeerError(f"rank {self._rank} waited for the others: {reason}")

    def _read(self, key: str) -> str:
        return self._store.get(key).decode(errors="replace")

    @contextmanager
    def _reaching_store(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"rank {self._rank}: lost the meeting point of the ranks: {error}") from None


def _wait_before(deadline_s: float) -> bool:
    """Wait a little; False if it is too late. A call that blocks in the store could not be ended with Ctrl-C."""
    if time.monotonic() > deadline_s:
        return False
    time.sleep(_POLL_S)
    return True


def _signature(line: str) -> tuple[str, str, str]:
    """Number, introduction and proof; from others than a rank it means nothing, see `introduction`."""
    try:
        number, introduction, proof = json.loads(line)
        return str(number), str(introduction), str(proof)
    except (ValueError, TypeError):
        return "", line, ""


def _join(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class Introduction(NamedTuple):
    """One rank, as the others see it."""

    address: tuple[str, int]
    """Numeric host, and port."""
    machine: str
    """Tells machines apart."""
    links_path: str
    """Path under which the emulated links can be opened; rank 0's counts."""
    encrypted: bool
    """True if it speaks TLS."""


def introduce(
    rank: int, listener: socket.socket, config: TransportConfig, rendezvous: Meeting, links: Links | None
) -> list[Introduction]:
    """Tell the others about this rank and learn about them; RunError when some don't come in time."""
    own = {
        "host": config.advertise_host or config.host,
        "port": listener.getsockname()[1],
        # the same for all processes on this machine until it reboots, in containers as well
        "machine": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "links_path": links.path if links else "",
        "encrypted": config.tls is not None,
    }
    texts = rendezvous.introduce(json.dumps(own), config.connect_timeout_s)
    ranks = [_parse(text, f"rank {rank}: what rank {peer} says of itself") for peer, text in enumerate(texts)]
    if unlike := [peer for peer, known in enumerate(ranks) if known.encrypted != ranks[rank].encrypted]:
        who = [f"rank {rank}", _join([f"rank {peer}" for peer in unlike])]
        speaks, silent = who if config.tls is not None else reversed(who)
        raise InputError(
            f"transport: {speaks} has certificates and speaks TLS, {silent} has none; start all ranks with --certs, or "
            "all with --allow-plaintext"
        )
    if len({known.machine for known in ranks}) > 1:
        _check_distance(ranks, config)
    return ranks


def _check_distance(ranks: list[Introduction], config: TransportConfig) -> None:
    """Check that all ranks are on one machine for emulated links, which share memory and a clock, or loopback."""
    if config.link_shapes():
        raise InputError("transport: an emulated WAN needs all ranks on one machine; leave out the emulation")
    for peer, known in enumerate(ranks):
        if ipaddress.ip_address(known.address[0]).is_loopback:
            raise InputError(
                f"transport: rank {peer} listens on {known.address[0]}, where other machines can't reach it; "
                "give every rank an address of its machine as host"
            )


def _parse(text: str, source: str) -> Introduction:
    try:
        data = json.loads(text)
        host, port, machine, links_path = (data[key] for key in ("host", "port", "machine", "links_path"))
        port, encrypted = int(port), bool(data["encrypted"])
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{source} makes no sense: {text[:80]!r}; do all ranks run the same farpipe?") from None
    return Introduction(resolve(str(host), port)[1], str(machine), str(links_path), encrypted)
