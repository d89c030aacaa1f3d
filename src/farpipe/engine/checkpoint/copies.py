"""Copies of checkpoints elsewhere, as a training sees them: at the other sites, and in a bucket."""

from collections.abc import Set
from pathlib import Path
from typing import Final

from farpipe.engine.checkpoint.bucket import ToBucket
from farpipe.engine.checkpoint.fetch import await_all, await_progress
from farpipe.engine.checkpoint.mirror import Mirror
from farpipe.engine.executor.peers import Peers
from farpipe.engine.run_spec import RunSpec

NOTHING_TRAVELS: Final = "training.mirror: every site writes whole checkpoints by itself, so nothing has to travel"
BUCKET_S: Final = 600.0
"""Longest wait at the end of a run for the bucket to take this process's file."""


class Copies:
    """One process's part in all copies; it does nothing where the run wants none."""

    def __init__(self, run: RunSpec, peers: Peers, run_dir: Path, start_step: int) -> None:
        """`start_step`: of the checkpoint that the run has started from. InputError for a bucket without a driver."""
        self._run, self._peers = run, peers
        self._mirror = Mirror(run, peers, run_dir, start_step) if run.is_mirrored else None
        url = run.plan.training.bucket if run.plan.training is not None and run.device != "sleep" else None
        self._bucket = None if url is None else ToBucket(url, peers, run.checkpoints(run_dir, peers.rank))

    def start(self) -> list[str]:
        """Begin, in threads; what there is to say about it."""
        if self._bucket is not None:
            self._bucket.start()
        if self._mirror is not None:
            self._mirror.start()
        return [NOTHING_TRAVELS] if self._mirror is not None and self._mirror.nothing_travels else []

    def step_took(self, step_s: float) -> None:
        """Take note of the length of a step."""
        if self._mirror is not None:
            self._mirror.rates.step_took(step_s)

    def still_needed(self) -> Set[int]:
        """Steps of checkpoints that are kept though newer ones are whole."""
        return frozenset() if self._mirror is None else self._mirror.still_needed()

    def news(self) -> tuple[dict[str, int], list[str]]:
        """Newest full checkpoint by site and bucket, and what went wrong since the last call; for rank 0."""
        newest, problems = ({}, []) if self._mirror is None else self._mirror.news()
        further, more = ({}, []) if self._bucket is None else self._bucket.news()
        return newest | further, problems + more

    def finish(self) -> None:
        """Wait on all ranks together until the last checkpoint is everywhere, or can't be."""
        if self._mirror is None and self._bucket is None:
            return
        if self._mirror is not None:
            self._mirror.finish()
        if self._bucket is not None:
            bucket = self._bucket
            what = f"the bucket {self._run.plan.training and self._run.plan.training.bucket}"
            await_progress(lambda: bucket.is_settled, lambda: 0, BUCKET_S, what)
        await_all(self._peers, "copies settled")
        if self._mirror is not None:
            self._mirror.tell_full()
        if self._bucket is not None and self._peers.rank == 0:
            self._bucket.await_manifest()
        self._peers.exchange("copied", b"", waiting_for="the others to have the last checkpoint")

    def stop(self) -> None:
        """End the threads; what is under way goes on after the next start. A second call does nothing."""
        if self._mirror is not None:
            self._mirror.stop()
        if self._bucket is not None and self._bucket.is_alive():
            self._bucket.end()
