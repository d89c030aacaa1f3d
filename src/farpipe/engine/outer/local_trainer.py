"""The training of one site that trains by itself, and exchanges differences with other sites now and then."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from farpipe.engine.checkpoint.files import Piece
from farpipe.engine.data.batches import load_batches
from farpipe.engine.executor.peers import Peers
from farpipe.engine.executor.work import Trainer
from farpipe.engine.outer.local_exchange import LocalExchange
from farpipe.engine.outer.local_membership import LocalMembership
from farpipe.engine.outer.sites import share_of
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.run_text import shape_of, trained
from farpipe.planning.documents.batches import Share


class LocalTrainer(Trainer):
    """The Trainer of one rank of one site."""

    def __init__(self, run: RunSpec, peers: Peers, whole: RunSpec, membership: LocalMembership) -> None:
        """`run`: what this site runs; `whole`: the run of all sites."""
        self._whole, self.membership = whole, membership
        self.run_actions: Callable[[int], object] = lambda tag: None
        super().__init__(run, peers)
        assert whole.local_steps is not None
        self.exchange = LocalExchange(
            whole.local_steps, super().state(), peers, float(run.tokens_per_step), self._weights_have_changed
        )

    def _open_data(self, run: RunSpec) -> None:
        (model, training), site = trained(run), self.membership.site
        share = Share(self._place.replica, run.num_replicas, *share_of(self._whole, site))
        self._batches = load_batches(run.plan.data, model, shape_of(run), training.seed, share)

    def begin(self, step: int) -> int:
        """Meet the other sites with `step` steps done; the step to begin with."""
        return self.membership.begin(step, self.exchange)

    def finish_step(self, step: int) -> tuple[float, NDArray[np.int64]]:
        found = super().finish_step(step)
        self.membership.exchange_after(step + 1, self.exchange, is_last=step + 1 == self._num_steps)
        return found

    def after_step(self, num_steps: int) -> None:
        """Do nothing more: the exchange is part of the step."""

    def state(self) -> Sequence[Piece]:
        return [*super().state(), *self.exchange.state()]
