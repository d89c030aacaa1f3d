"""Mirrors checkpoints: what a site lacks for the newest one comes from the others while the training goes on.

Every process sends its file of the newest whole checkpoint to the first process of each site that has not its rank,
with MIRROR_SHARE of what the steps leave free of the link. When a site has all files it tells rank 0. It keeps the
newest full checkpoint until it has the next one, however many that takes beyond `keep_checkpoints`.
"""

import json
from collections.abc import Set
from pathlib import Path
from typing import Final

from farpipe.core.errors import FarpipeError, InputError
from farpipe.core.step import Link
from farpipe.engine.checkpoint.fetch import FULL_RATE, INCOMING_NAME, await_progress
from farpipe.engine.checkpoint.folders import MANIFEST_NAME, folder_of, whole_checkpoints
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.checkpoint.transfer import Receiver, Sender
from farpipe.engine.checkpoint.whole_file import is_here
from farpipe.engine.executor.peers import Peers
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.transport.free_rate import FreeRate

MIRROR_SHARE: Final = 0.8
"""Part of what a step leaves free of a link that mirroring takes."""
BOX: Final = "mirrored"


class MirrorRates:
    """Rates at which this process may send files, from the links and the steps' own messages."""

    def __init__(self, run: RunSpec, rank: int, targets: dict[str, int]) -> None:
        """`targets`: process that takes this one's file, by site."""
        self._rates: dict[int, FreeRate] = {}
        own, sent = run.places.site(rank), sent_bytes(run)
        for site, target in targets.items():
            name = f"{own}>{site}"
            senders = sum(run.places.site(process) == own for process in run.mirrored_to(site))
            link = _link_of(run, name)
            bandwidth = None if link is None else link.bandwidth_bytes_per_s
            self._rates[target] = FreeRate(bandwidth, sent.get(name, 0.0), MIRROR_SHARE, max(1, senders))

    def step_took(self, step_s: float) -> None:
        """Take note of the length of a step."""
        for rate in self._rates.values():
            rate.step_took(step_s)

    def no_steps(self) -> None:
        """No step is running any more: the links are free."""
        for rate in self._rates.values():
            rate.no_steps()

    def __call__(self, target: int) -> float:
        """Bytes/s that may go to `target` now."""
        rate = self._rates[target].bytes_per_s
        return FULL_RATE if rate is None else rate


def sent_bytes(run: RunSpec) -> dict[str, float]:
    """Bytes that all replicas send over each link in a step, of hops and, each once, of collectives."""
    problem, found = run.plan.problem, dict.fromkeys(run.plan.problem.links, 0.0)
    for hop in problem.hops:
        for transfer in (hop.forward, hop.backward) if hop is not None else ():
            for name, sizes in problem.shares(transfer) if transfer is not None and transfer.link else ():
                found[name] += run.num_replicas * float(sizes.sum())
    for one in problem.collectives:
        if isinstance(one.transfer.link, str) and one.transfer.link:
            found[one.transfer.link] += float(problem.row(one.transfer.bytes)[0])
    return found


def _link_of(run: RunSpec, name: str) -> Link | None:
    """The link between two sites, or the slowest between any where the run has none of that name."""
    problem = run.plan.problem
    between = [link for other, link in problem.links.items() if problem.between_sites[other]]
    return problem.links.get(name) or min(between, key=lambda link: link.bandwidth_bytes_per_s, default=None)


class Mirror:
    """One process's part in mirroring."""

    def __init__(self, run: RunSpec, peers: Peers, run_dir: Path, start_step: int) -> None:
        """`start_step`: of the checkpoint that the run has started from, which every site can read."""
        self._run, self._peers, self._start_step = run, peers, start_step
        self._checkpoints, self._site = run.checkpoints(run_dir, peers.rank), run.places.site(peers.rank)
        self._incoming = self._checkpoints.with_name(INCOMING_NAME)
        sites = [site for site in run.places.sites if peers.rank in run.mirrored_to(site)]
        self._targets = {site: run.places.at(site)[0] for site in sites}
        self.rates = MirrorRates(run, peers.rank, self._targets)
        self._sender = Sender(peers, self.rates, self._offer_newest)
        self._receiver = Receiver(peers, self._incoming, self._checkpoints, self._on_file)
        self._offered: dict[int, int] = {}
        """Step of the last file that was offered, by target."""
        self._needed = {f"rank-{process}.safetensors" for process in run.mirrored_to(self._site)}
        self._is_first = peers.rank == run.places.at(self._site)[0]
        self._arrived: set[int] = set()
        """Steps of files that have come and that may have been the last ones."""
        self._news: dict[str, int] = {}
        """Newest full checkpoint of each site, on rank 0."""

    @property
    def nothing_travels(self) -> bool:
        """True if every site writes whole checkpoints by itself, as with replicas."""
        return not any(self._run.mirrored_to(site) for site in self._run.places.sites)

    def start(self) -> None:
        """Begin, in threads of its own."""
        self._sender.start()
        if self._is_first and self._needed:
            self._receiver.start()

    def _offer_newest(self, sender: Sender) -> None:
        """Offer this process's file of the newest whole checkpoint to who is not busy with an earlier one."""
        self.tell_full()
        busy = {one.target for one in sender.outgoing}
        idle = [target for target in self._targets.values() if target not in busy]
        step = next(iter(whole_checkpoints(self._checkpoints)), None) if idle else None
        for target in idle if step is not None else ():
            assert step is not None
            if self._offered.get(target) != step:
                self._offered[target] = step
                self._offer(sender, target, step)

    def _offer(self, sender: Sender, target: int, step: int) -> None:
        folder = folder_of(self._checkpoints, step)
        try:
            files = Manifest.load(folder).files
            entry = next((e for e in files if e.name == f"rank-{self._peers.rank}.safetensors"), None)
            if entry is not None and entry.site == self._site:
                sender.offer(target, step, entry, folder / entry.name)
        except (OSError, InputError):  # it was removed, as newer ones are whole
            del self._offered[target]

    def _on_file(self, step: int, problem: str) -> None:
        """A file has come from another site, or could not be kept."""
        if problem:
            self._peers.post(0, BOX, json.dumps({"site": self._site, "problem": problem}).encode())
        else:
            self._arrived.add(step)

    def tell_full(self) -> None:
        """Tell rank 0 of checkpoints that have become full here; a file may have come before this site's manifest."""
        for step in [*self._arrived]:
            if (folder_of(self._checkpoints, step) / MANIFEST_NAME).exists():
                self._arrived.discard(step)
                if self._is_full(step):
                    self._peers.post(0, BOX, json.dumps({"site": self._site, "step": step}).encode())

    def _is_full(self, step: int) -> bool:
        """True if this site has all that it needs of a checkpoint."""
        if step == self._start_step:
            return True
        folder = folder_of(self._checkpoints, step)
        try:
            files = Manifest.load(folder).files
        except InputError:
            return False
        return all(is_here(folder / e.name, e) for e in files if e.site == self._site or e.name in self._needed)

    def still_needed(self) -> Set[int]:
        """Steps of checkpoints that are kept though newer ones are whole: the newest full one, and that on its way."""
        if not self._needed:
            return frozenset()
        steps = whole_checkpoints(self._checkpoints)
        full = next((step for step in steps if self._is_full(step)), None)
        parts = {int(part.name.split("-")[1]) for part in self._incoming.glob("step-*.part")}
        return parts | ({full} if full is not None else set())

    def news(self) -> tuple[dict[str, int], list[str]]:
        """Newest full checkpoint of every site, and what went wrong since the last call; for rank 0."""
        problems = []
        for _, payload in self._peers.poll(BOX):
            words = json.loads(payload)
            if "problem" in words:
                problems.append(f"not mirrored at {words['site']}: {words['problem']}")
            else:
                self._news[words["site"]] = max(words["step"], self._news.get(words["site"], 0))
        return dict(self._news), problems

    def finish(self) -> None:
        """Wait until this process's file of the last checkpoint is everywhere, or can't be; now links are free.

        RunError when nothing moves for `timeout_s`.
        """
        self.rates.no_steps()
        newest = next(iter(whole_checkpoints(self._checkpoints)), None)

        def has_sent() -> bool:
            offered = all(self._offered.get(target) == newest for target in self._targets.values())
            return offered and not self._sender.outgoing

        limit_s = self._run.transport.timeout_s
        what = f"the checkpoint of step {newest} to be mirrored"
        await_progress(has_sent, lambda: self._sender.moved_bytes, limit_s, what, self._sender.is_alive)

    def stop(self) -> None:
        """End the threads; what is under way goes on after the next start. A second call does nothing."""
        for thread in (self._sender, self._receiver):
            if thread.is_alive():
                try:
                    thread.end()
                except FarpipeError:
                    continue
