"""One matrix as embedding on the first stage and as head on the last: two copies that stay equal to the last bit."""

from typing import Final

import torch
from torch import Tensor, nn

from farpipe.engine.executor.peers import Messenger, TensorMessage
from farpipe.engine.replicas.collectives import local_grad
from farpipe.engine.transport import Tag

FIRST_STAGE: Final = 0


class EndsExchange:
    """The ranks of the first and of the last stage give each other one tensor in every step."""

    def __init__(self, peers: Messenger, ranks: tuple[int, int], last_stage: int, *, copies: bool = False) -> None:
        """`ranks`: of the first and of the last stage, two different ones. `copies`: see `Line`."""
        self.peers, self.last_stage, self._copies = peers, last_stage, copies
        self._rank_of = {FIRST_STAGE: ranks[0], last_stage: ranks[1]}

    def send(self, step: int, stage: int, tensor: Tensor) -> None:
        """Send `tensor` from `stage`, which is on this rank, to the other end; see `Messenger.send`."""
        peer = self._rank_of[other_end(stage, self.last_stage)]
        self.peers.send(peer, "sync", Tag(step, stage, 0), tensor.to("cpu", copy=self._copies))

    def receive(self, step: int, stage: int) -> TensorMessage:
        """Receive the gradient that the other end has sent to `stage`, which is on this rank."""
        other = other_end(stage, self.last_stage)
        what = f"the tied weights' gradient of stage {other} in step {step}"
        return self.peers.receive(self._rank_of[other], "sync", Tag(step, other, 0), waiting_for=what)


def other_end(stage: int, last_stage: int) -> int:
    """The last stage for the first one, and vice versa."""
    return last_stage if stage == FIRST_STAGE else FIRST_STAGE


class TiedWeights:
    """A rank's copies of the shared matrix: the embedding, the head, or both in different stages.

    Every copy ends up with the same gradient, embedding's plus head's in this order, and from equal weights and equal
    gradients the optimizer makes equal weights.
    """

    def __init__(self, copies: dict[int, nn.Parameter], last_stage: int, exchange: EndsExchange | None) -> None:
        """`copies` by stage; `exchange` where the copies are on two ranks."""
        self.copies, self.last_stage, self.exchange = copies, last_stage, exchange

    def stage_done(self, step: int, stage: int) -> None:
        """The gradient of a copy is complete: send it while other stages are still at work."""
        if self.exchange is not None and stage in self.copies:
            self.exchange.send(step, stage, local_grad(self.copies[stage]))

    @torch.no_grad()
    def sum_gradients(self, step: int) -> list[TensorMessage]:
        """Give this rank's copies the gradient of both; the messages that were received for it.

        In new memory: an end's own gradient may still be on its way, late or again after an outage, to the other end
        and in parts to other replicas.
        """
        grads = {stage: local_grad(copy) for stage, copy in self.copies.items()}
        messages = [] if self.exchange is None else [self.exchange.receive(step, stage) for stage in self.copies]
        for message, (stage, copy) in zip(messages, self.copies.items(), strict=False):
            grads[other_end(stage, self.last_stage)] = message.tensor.to(copy.device)
        if grads:
            total = grads[FIRST_STAGE] + grads[self.last_stage]
            for copy in self.copies.values():
                assert copy.grad is not None
                copy.grad = torch.empty_like(copy.grad)
                local_grad(copy).copy_(total)
        return messages
