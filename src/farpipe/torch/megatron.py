"""The pipeline of Megatron-Core over farpipe's transport.

pipeline = farpipe.torch.megatron(config)                           # once, when Megatron's groups are made
forward_backward_func(..., **pipeline)                              # its get_forward_backward_func()'s, every step
"""

from copy import copy
from typing import Any

import torch.distributed as dist

from farpipe.core.errors import InputError
from farpipe.torch.backend import farpipe_group
from farpipe.torch.versions import expect_tested
from farpipe.torch.works import raised_as_torch


def megatron(config: Any, pg_collection: Any = None) -> dict[str, Any]:
    """The arguments `p2p_communicator` and `pg_collection` of Megatron-Core's pipeline schedules.

    The pipeline's group is one of "farpipe" with the same ranks, set up by the environment; all other groups are those
    of `pg_collection`, or without it Megatron's own. On all ranks at the same time.

    ValueError for a `config` that sends messages of the pipeline over other groups.
    """
    from megatron.core import __version__
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = copy(pg_collection or ProcessGroupCollection.use_mpu_process_groups())
    with raised_as_torch():
        expect_tested("megatron-core", __version__)
        if dist.get_world_size(groups.pp) == 1:
            raise InputError("a pipeline over one rank has no peer to send to; set pipeline_model_parallel_size")
        if dist.get_world_size(groups.pp) == 2 and not config.batch_p2p_comm:
            raise InputError(
                "Megatron-Core sends half of the messages of two pipeline ranks over the group of all ranks unless "
                "batch_p2p_comm is set, which overlap_p2p_comm switches off: --no-overlap-p2p-communication"
            )
        groups.pp = farpipe_group(groups.pp)
    return {"p2p_communicator": P2PCommunicator(pp_group=groups.pp, config=config), "pg_collection": groups}
