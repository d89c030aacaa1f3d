"""The training of one site whose replicas are exact copies of other sites': gradients are summed over all of them.

Where a site is lost in the middle of a step, those that are left compute its share too, from the same weights: so the
step is the same, to the last bit.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from farpipe.core.errors import RunError
from farpipe.engine.data.batches import Batch, Batches
from farpipe.engine.executor.peers import Peers
from farpipe.engine.executor.work import Trainer, batches_of
from farpipe.engine.outer.giving import Taking
from farpipe.engine.outer.joining import World
from farpipe.engine.outer.local_trainer import LocalTrainer
from farpipe.engine.outer.membership import Membership
from farpipe.engine.outer.replica_sum import Gradient, add, received_bytes, sum_over
from farpipe.engine.outer.sites import replicas_at, sites_of
from farpipe.engine.run_spec import RunSpec

MakeElastic = Callable[[RunSpec, Peers], "ElasticTrainer | LocalTrainer"]
"""Makes the work of one rank of one site, from what the site runs and its ranks."""
_STEP_BITS: Final = 40
_STEP: Final = (1 << _STEP_BITS) - 1
"""A step's number, and above it the site, from 1, whose share is computed for it: messages of both need other tags."""
STATE_S: Final = 60.0
"""Longest wait for another site to begin to send its state."""


class ElasticTrainer(Trainer):
    """The Trainer of one rank of one site."""

    def __init__(self, run: RunSpec, peers: Peers, whole: RunSpec, membership: Membership) -> None:
        """`run`: what this site runs; `whole`: the run of all sites."""
        self._whole, self.membership = whole, membership
        self._shares: dict[int, Batches] = {}
        self._evaluated: Batches | None = None
        self._own_loss = float("nan")
        self._total = torch.empty(0)
        self.run_actions: Callable[[int], object] = lambda tag: None
        """Runs this rank's order of actions once; the argument numbers its messages."""
        super().__init__(run, peers)

    def _open_data(self, run: RunSpec) -> None:
        self._batches = self._share(self.membership.own)
        self._evaluated = batches_of(run, self._place.replica)

    def _share(self, site: int) -> Batches:
        """The batches of this process's replica, or of the same one at another site."""
        if site not in self._shares:
            replica = replicas_at(self._whole, sites_of(self._whole)[site])[self._place.replica]
            self._shares[site] = batches_of(self._whole, replica)
        return self._shares[site]

    def _batch(self, step: int) -> Batch | None:
        if self._batches is None:
            return None
        site = (step >> _STEP_BITS) - 1 if step > _STEP else self.membership.own
        return self._share(site).batch(step & _STEP)

    def begin_evaluation(self, index: int) -> int:
        """The same text at every site, which each evaluates by itself."""
        own, self._batches = self._batches, self._evaluated
        try:
            return super().begin_evaluation(index)
        finally:
            self._batches = own

    @property
    def loss(self) -> float:
        return self._own_loss

    def begin(self, step: int) -> int:
        """Meet the other sites with `step` steps done; the step to begin with, when this site has their state."""
        world = self.membership.meet(step)
        return step if world is None else self._return(world)

    def _return(self, world: World) -> int:
        """Take the state of the others, then replay the steps that they do meanwhile."""
        taking = Taking(world, STATE_S)
        step = taking.first_step()
        state = self._state()
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in state]
        taking.fill(copies, step)
        with torch.no_grad():
            for tensor, copy in zip(state, copies, strict=True):
                tensor.copy_(copy)
        self.restore(step)
        flat, enters = torch.empty(sum(shard.parameter.numel() for shard in self.shards)), False
        while not enters:
            enters = taking.gradient(step, flat)
            self._put(flat)
            self._update(step)
            step += 1
        self.membership.enter(step)
        return step

    def _state(self) -> list[Tensor]:
        """Live views of weights and moments of all that this process updates."""
        weights = [shard.parameter.detach() for shard in self.shards]
        moments = [self._optimizer.moments(shard.parameter) for shard in self.shards]
        return weights + [one[name] for name in ("exp_avg", "exp_avg_sq") for one in moments]

    def after_step(self, num_steps: int) -> None:
        """Between two steps: what membership does."""
        self.membership.after_step(num_steps, self._total, lambda: [one.cpu().clone() for one in self._state()])

    def _sum_over_sites(self, step: int) -> None:
        membership = self.membership
        mine = {membership.own: self._gradient()}
        for site in membership.shares[1:]:
            mine[site] = self._compute(step, site)
        total = self._sum(step, mine)
        if not membership.settle(step, has_sum=total is not None):
            for site in range(membership.num_sites):
                if site not in mine:
                    mine[site] = self._compute(step, site)
            total = add(mine)
        assert total is not None
        self._total, self._own_loss = total.flat, total.loss
        self._put(total.flat)

    def _sum(self, step: int, mine: dict[int, Gradient]) -> Gradient | None:
        """The sum of all sites' shares; None where the world breaks."""
        membership = self.membership
        if membership.world is None:
            return add(mine)
        try:
            if (transport := membership.world.transport) is None:
                return None
            begin_ns = transport.clock.now_ns()
            total = sum_over(transport, step, mine, membership.members, membership.num_sites)
            num_bytes = received_bytes(total.flat.nbytes, len(mine), len(membership.members), membership.num_sites)
            membership.came("gradient", membership.names, num_bytes, transport.clock.now_ns(), begin_ns)
            return total
        except RunError as error:
            membership.note("broken", step=step, reason=str(error)[:200])
            return None

    def _compute(self, step: int, site: int) -> Gradient:
        """Compute another site's share with all ranks of this one."""
        for shard in self.shards:
            shard.parameter.grad = shard.whole.grad = None
        tag = step + ((site + 1) << _STEP_BITS)
        self.begin_step(tag)
        self.run_actions(tag)
        self.sum_gradients(tag)
        return self._gradient()

    def _gradient(self) -> Gradient:
        """What the stages have made, as a copy, and their loss."""
        grads = [shard.parameter.grad for shard in self.shards]
        flat = torch.cat([grad.detach().reshape(-1).cpu() for grad in grads if grad is not None] or [torch.empty(0)])
        return Gradient(flat, Trainer.loss.fget(self))  # type: ignore[attr-defined]

    @torch.no_grad()
    def _put(self, flat: Tensor) -> None:
        """Make `flat` the gradient of all that this process updates; a copy, since clipping writes over it."""
        start = 0
        for shard in self.shards:
            parameter = shard.parameter
            part = flat[start : start + parameter.numel()].view_as(parameter)
            parameter.grad = part.to(parameter.device, copy=True)
            start += parameter.numel()
