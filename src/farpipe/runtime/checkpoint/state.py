"""A process's share of the training's state, as pieces of the whole model's tensors: weights and AdamW's moments."""

from collections.abc import Iterable, Iterator

from farpipe.runtime.checkpoint.files import Piece
from farpipe.runtime.model.decoder import shared_name
from farpipe.runtime.optimizer import Optimizer
from farpipe.runtime.replicas.flat import Shard
from farpipe.spec import Model


def state_pieces(shards: Iterable[Shard], model: Model, optimizer: Optimizer, *, is_writer: bool) -> Iterator[Piece]:
    """Live views of what this process's optimizer updates, and of its moments.

    `is_writer`: whether the process puts what its replicas hold as well into checkpoints. Where embedding and head are
    one matrix in two stages, both are written: so each site has what its stages need.
    """
    for shard in shards:
        name, is_mine = shared_name(shard.name, model), is_writer or shard.parameter is not shard.whole
        values = {"weight": shard.parameter.detach()} | optimizer.moments(shard.parameter)
        for kind, tensor in values.items():
            yield Piece(f"{kind}/{name}", tuple(shard.whole.shape), shard.start, tensor.view(-1), is_mine)
