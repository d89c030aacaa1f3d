"""What a rank of a training sends its activations and gradients through; see `Messenger`."""

from farpipe.engine.executor.peers import Messenger, Peers
from farpipe.engine.executor.staging import Staging, take_page_locked
from farpipe.engine.executor.wire_types import NarrowMessenger
from farpipe.engine.executor.work import Trainer, Work
from farpipe.engine.message_room import leaving_bytes, message_sizes
from farpipe.engine.replicas.replicas import PipelinePeers
from farpipe.engine.run_spec import RunSpec


def staging_of(run: RunSpec, peers: Peers, work: Work) -> Staging:
    """The messages of a GPU, with page-locked memory for as many as may wait at once."""
    pipeline = PipelinePeers(peers, run.places)
    if isinstance(work, Trainer) and not work.on_chunks:  # chunks have messages of many sizes
        at = next(iter(work.torch_stages.values())).message
        take_page_locked(message_sizes(run, peers.rank, at.num_elements, at.dtype.itemsize, len(at.shape)))
    return Staging(pipeline, peers.abort, leaving_bytes=leaving_bytes(run, pipeline.rank))


def pipeline_of(run: RunSpec, peers: Peers, staging: Staging | None) -> Messenger:
    """The ranks of this process's replica; with a wire type, those between its sites are narrowed, on a GPU there."""
    pipeline = staging or PipelinePeers(peers, run.places)
    if run.device == "sleep" or run.plan.training is None or run.plan.training.wire_type == "none":
        return pipeline  # a rehearsal sends the Problem's bytes, whatever they stand for
    return NarrowMessenger(
        pipeline, run.places.replicas[run.places.of(peers.rank).replica], run.plan.training.wire_type
    )
