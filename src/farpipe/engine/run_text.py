"""The text of a run: its batches, and the digest by which two runs are known to train on the same. Needs no torch."""

from farpipe.core.spec import Model, Training
from farpipe.engine.run_spec import RunSpec
from farpipe.planning.documents.batches import DocumentBatches, Shape, TextBatches, load_document_batches
from farpipe.planning.documents.tokens import load_tokens, require_vocabulary


def trained(run: RunSpec) -> tuple[Model, Training]:
    """Model and training of a run that computes."""
    assert run.plan.model is not None
    assert run.plan.training is not None
    return run.plan.model, run.plan.training


def shape_of(run: RunSpec) -> Shape:
    """Shape of a step's tokens, of all replicas together."""
    _, training = trained(run)
    assert training.microbatch_size is not None
    num_microbatches = run.plan.problem.num_microbatches * run.num_replicas
    return num_microbatches, training.microbatch_size, training.sequence_length


def documents_of(run: RunSpec) -> DocumentBatches:
    """Return the batches of documents of a training on chunks; InputError if the text can't be read or does not fit."""
    return load_document_batches(run.plan.data, *trained(run))


def digest_of_text(run: RunSpec) -> bytes:
    """Digest of what every step trains on; InputError if the text can't be read or does not fit."""
    if run.chunk_costs is not None:
        return documents_of(run).digest
    model, training = trained(run)
    tokens = load_tokens(run.plan.data)
    require_vocabulary(tokens, model)
    return TextBatches(tokens, shape_of(run), training.seed, held_out=run.plan.data.held_out).digest
