"""One process's part in publishing a training's weights: versions between steps, and sessions with subscribers.

All processes take a version after the same step, since rank 0 asks for it ahead of the exchange that ends the step.
What that costs the step is one copy of the process's part. Everything else happens in threads, in calls that let go of
Python's lock. They have the priority of all others: one of lower priority that holds the lock when it has to wait for
a core would hold up the step.
"""

import dataclasses
import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from farpipe.core.errors import FarpipeError
from farpipe.core.simulate import simulate
from farpipe.core.spec.experts_by_number import config_with_experts
from farpipe.core.spec.publish import PublishSettings
from farpipe.core.strict import read_text, validate, write_text
from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.checkpoint.manifest import trained_by
from farpipe.engine.executor.peers import Peers
from farpipe.engine.publish.session import Served, Session
from farpipe.engine.publish.version import (
    TORCH_TYPES,
    PartForm,
    PieceForm,
    Shelf,
    Version,
    WeightType,
    as_bits,
)
from farpipe.engine.publish.words import (
    FILE_NAME,
    MEET_S,
    OUTAGE_S,
    PUBLISHER,
    SUBSCRIBER,
    TOKEN_VARIABLE,
    Greeting,
    Publication,
)
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.transport import TransportConfig, connect, handshake
from farpipe.engine.transport.dialler import Listener
from farpipe.engine.transport.free_rate import FreeRate
from farpipe.engine.transport.pair import LIMIT_S, PairMeeting, hear, say
from farpipe.engine.transport.passages import Links, Shared
from farpipe.engine.transport.security.tls import Credentials, RefusedError, site_of
from farpipe.engine.transport.tcp import listen

PUBLISH: Final = b"p"
"""The command to take a version after this step."""
END_S: Final = 30.0
"""Longest wait, at the end of a training, for subscribers to get the last version."""
_STREAMS: Final = 4
_BUFFER_BYTES: Final = 8 << 20
_TOKEN_BYTES: Final = 32
_KIND: Final = "weight/"
_POLL_S: Final = 0.02

MakePublisher = Callable[[RunSpec, Peers, Callable[[], Sequence[Piece]], Path], "Publisher"]
"""Makes a process's publisher from its run, its peers, what it holds, and the run directory; on all ranks at once."""


class Publisher:
    """One process's part in publishing."""

    def __init__(
        self,
        run: RunSpec,
        peers: Peers,
        state: Callable[[], Sequence[Piece]],
        run_dir: Path,
        *,
        config: TransportConfig,
        links: Links | None = None,
    ) -> None:
        """`config`: of this process's transport in the training, whose host, certificates and emulated `links` count.

        All processes make theirs at once. InputError when the port is taken.
        """
        assert run.publish is not None
        self._run, self._peers, self._state, self._config, self._links = run, peers, state, config, links
        self._settings: PublishSettings = run.publish
        self._site = run.places.site(peers.rank)
        self._credentials = Credentials(config.tls)
        sock = listen(dataclasses.replace(config, port=_port(run.publish.port)))
        self._token, self._mine, self._served = self._agree(sock, run_dir)
        self._rates: dict[str, FreeRate] = {}
        self._sessions: dict[threading.Thread, Served] = {}
        self._lock = threading.Lock()
        self._listener = Listener(sock, self._token, self._credentials, self._serve, self._log)

    def _agree(self, sock: socket.socket, run_dir: Path) -> tuple[bytes, list[int], Served]:
        """The token, the places in the state of what this process publishes, and what its sessions need."""
        pieces = list(self._state())
        forms = {place: _form(piece) for place, piece in enumerate(pieces) if piece.name.startswith(_KIND)}
        mine = {place: form for place, form in forms.items() if pieces[place].is_mine}
        host = self._config.advertise_host or self._config.host
        words = {
            "address": {"host": host, "port": sock.getsockname()[1], "site": self._site},
            "pieces": [form.model_dump_json() for form in mine.values()],
            "token": _token(run_dir) if self._peers.rank == 0 else "",
        }
        payloads = self._peers.exchange("publish", json.dumps(words).encode(), waiting_for="who publishes what")
        found = [json.loads(payload) for payload in payloads]
        earlier = {piece for other in found[: self._peers.rank] for piece in other["pieces"]}
        kept = {place: form for place, form in mine.items() if form.model_dump_json() not in earlier}
        publication = _publication(self._run, [other["address"] for other in found if other["pieces"]])
        form = PartForm(weight_type=_weight_type(self._run, self._settings), pieces=tuple(kept.values()))
        token = str(found[0]["token"])
        if self._peers.rank == 0:
            _write(run_dir, publication, token)
        return token.encode(), [*kept], Served(publication, form, Shelf(), FreeRate(None, 0.0, 1.0))

    def before_exchange(self, step: int, ask: Callable[[int, bytes], None]) -> None:
        """Ask for a version after `step`, if one is due, ahead of the exchange that ends it."""
        is_due = (step + 1) % self._settings.every_steps == 0 or step + 1 == self._run.num_steps
        if self._peers.rank == 0 and is_due and self._served.shelf.may_change:
            ask(step, PUBLISH)

    def after_exchange(self, step: int, commands: set[bytes], step_s: float) -> None:
        """Take a version after `step`, if that was asked for; on all processes, before the weights change again."""
        for rate in list(self._rates.values()):
            rate.step_took(step_s)
        if PUBLISH in commands:
            self.take(step + 1)

    @torch.no_grad()
    def take(self, num_steps: int) -> None:
        """Take a version after so many steps."""
        form, pieces, start = self._served.form, self._state(), 0
        flat = torch.empty(form.num_elements, dtype=TORCH_TYPES[form.weight_type])
        for place in self._mine:
            values = pieces[place].values.detach()
            flat[start : start + values.numel()].view(values.shape).copy_(values)  # rounds as the model's own copy is
            start += values.numel()
        self._served.shelf.put(Version(num_steps, as_bits(flat, form.weight_type)))

    def _serve(self, purpose: handshake.Purpose, sock: socket.socket, num_received: int) -> bool:
        """Take in a subscriber who knows the token, as a Listener's Serve."""
        with self._lock:
            self._sessions = {thread: one for thread, one in self._sessions.items() if thread.is_alive()}
            if len(self._sessions) >= self._settings.max_subscribers:
                raise RefusedError(f"it has {len(self._sessions)} subscribers already (publish.max_subscribers)")
            served = dataclasses.replace(self._served)
            thread = threading.Thread(
                target=self._run_session, args=(sock, served), name="farpipe publish", daemon=True
            )
            handshake.welcome(sock, 0)
            self._sessions[thread] = served
            thread.start()
        return True

    def _run_session(self, sock: socket.socket, served: Served) -> None:
        host = "somebody"
        try:
            with sock:
                host = str(sock.getpeername()[0])
                greeting = validate(Greeting, hear(sock, time.monotonic() + MEET_S), host)
                site = site_of(sock) or greeting.site
                say(sock, {"site": self._site})
                served.rate = self._rate(site)
                config, meeting = self._session_config(site), PairMeeting(sock, PUBLISHER, self._token, asks=False)
                with connect(PUBLISHER, 2, config, meeting) as transport:
                    Session(transport, served).run()
        except (FarpipeError, OSError) as error:
            self._log(f"{host}: {error}")

    def _session_config(self, site: str) -> TransportConfig:
        """Configuration of a session with a subscriber at `site`, whose link is emulated if the training's are."""
        name, shapes = f"{self._site}>{site}", self._config.link_shapes() if self._links is not None else {}
        return dataclasses.replace(
            self._config,
            port=0,
            streams=_STREAMS,
            outage_s=OUTAGE_S,
            connect_timeout_s=MEET_S,
            buffer_bytes=_BUFFER_BYTES,
            sites=(site, self._site) if site else (),
            bandwidths={},
            links={(PUBLISHER, SUBSCRIBER): (name, shapes[name])} if name in shapes else {},
            open_links=self._shared_links if name in shapes else None,
            own_paths=None,
        )

    def _shared_links(self) -> Links:
        assert self._links is not None
        return Shared(self._links)

    def _rate(self, site: str) -> FreeRate:
        """Rate of what goes from here to `site`, for all its subscribers together."""
        with self._lock:
            if site not in self._rates:
                name, problem = f"{self._site}>{site}", self._run.plan.problem
                link = self._run.link_between(self._site, site)
                sent = simulate(problem, self._run.plan.schedule, checked=True).link_bytes().get(name, 0.0)
                senders = sum(one.site == self._site for one in self._served.publication.addresses)
                bandwidth = None if link is None else link.bandwidth_bytes_per_s
                self._rates[site] = FreeRate(bandwidth, sent, self._settings.share, senders)
            return self._rates[site]

    def _log(self, text: str) -> None:
        print(f"publish: {text}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """No version comes any more: give subscribers time to get the last one, END_S at most."""
        self._served.shelf.end()
        for rate in list(self._rates.values()):
            rate.no_steps()
        deadline_s = time.monotonic() + min(END_S, self._run.transport.timeout_s / 2)
        while any(thread.is_alive() for thread in list(self._sessions)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End all sessions and listen no more."""
        deadline_s = time.monotonic() + LIMIT_S
        self._listener.close(deadline_s)
        with self._lock:
            sessions = dict(self._sessions)
        for served in sessions.values():
            served.is_closing = True
        for thread in sessions:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def _form(piece: Piece) -> PieceForm:
    offset = (piece.start,) if piece.offset is None else piece.offset
    sizes = (piece.values.numel(),) if piece.offset is None else tuple(piece.values.shape)
    return PieceForm(name=piece.name.removeprefix(_KIND), shape=piece.shape, offset=tuple(offset), sizes=sizes)


def _weight_type(run: RunSpec, settings: PublishSettings) -> WeightType:
    assert run.plan.training is not None
    return "float32" if settings.master_weights or run.plan.training.precision == "fp32" else "bfloat16"


def _port(first: int) -> int:
    return first + int(os.environ.get("LOCAL_RANK", "0")) if first else 0


def _publication(run: RunSpec, addresses: list[dict[str, Any]]) -> Publication:
    training, model = trained_by(run).model_dump_json(), run.plan.model
    assert model is not None
    config = ""
    if model.hugging_face is not None:
        config = read_text(Path(model.hugging_face) / "config.json")
    elif model.is_of_transformers:
        config = json.dumps(config_with_experts(model))
    words = {"model": model, "config": config, "addresses": addresses}
    return validate(Publication, {"training": hashlib.sha256(training.encode()).hexdigest(), **words}, "publish")


def _token(run_dir: Path) -> str:
    """The token in the environment, or that of an earlier attempt, or a new one."""
    if given := os.environ.get(TOKEN_VARIABLE):
        return given
    path = run_dir / FILE_NAME
    if path.exists():
        return str(json.loads(read_text(path))["token"])
    return secrets.token_hex(_TOKEN_BYTES)


def _write(run_dir: Path, publication: Publication, token: str) -> None:
    """Write ``publish.json``: where to subscribe, with the token; only its owner can read it."""
    first = publication.addresses[0]
    words = {"format": PartForm.FORMAT, "address": f"{first.host}:{first.port}", "token": token}
    write_text(run_dir / FILE_NAME, json.dumps(words, indent=1) + "\n", private=True)
