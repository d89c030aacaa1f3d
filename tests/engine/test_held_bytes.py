"""Memory that forwards hold for their backwards is counted once, however many share it, until nobody needs it."""

import pytest
import torch

from chunk_runs import make_run, write_documents
from engine.test_chunk_stage import AGAIN, LAW, MODELS, documents_of, make_stages
from farpipe.engine.stages.chunk_attention import HeldBytes
from farpipe.engine.stages.chunk_stage import ChunkBatch, chunk_batch
from farpipe.engine.stages.make_stage import make_stage, numerics_of
from farpipe.engine.stages.slices import slices as slices_of
from farpipe.planning.workload import Chunk, Slice
from farpipe.planning.workload.chunk import load_of
from farpipe.planning.workload.cut import Cut, cut_batch


def test_a_product_holds_its_inputs_but_no_parameters():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    counter = HeldBytes([weight])
    with counter.counting():
        y = (x @ weight) * 2 + x @ weight
    assert counter.now == x.nbytes
    counter.note(100)
    assert counter.peak == x.nbytes + 100
    y.sum().backward()
    del y
    assert counter.now == 0


def test_a_stage_holds_more_with_every_chunk_and_nothing_after_the_last_backward():
    model = MODELS["llama"]
    chunks = cut_batch([30, 5], Cut(10.0, 100), LAW).chunks()
    peaks = []
    for layers, keeps in ((0, False), (2, True), (2, False)):
        stage = make_stages(model, 1, torch.float64)[0]
        stage.begin_chunks(
            chunk_batch(chunks, documents_of(model, [30, 5])), [layers] * len(chunks), keeps_attention=keeps
        )
        held = []
        for index in range(len(chunks)):
            stage.forward(index, None)
            held.append(stage.held.now)
        assert held == sorted(held)
        assert held[0] > 0
        for index in reversed(range(len(chunks))):
            stage.backward(index, None)
        assert stage.held.now == 0
        peaks.append(stage.held.peak)
    assert peaks[2] < 0.7 * peaks[0], "layers that are computed again hold their input, keys and values only"
    assert peaks[2] < peaks[1] < peaks[0], "and attention's results besides where they keep them"


CHUNKINGS = {
    "whole": [[Slice(0, 0, 64, 64)], [Slice(1, 0, 48, 48)]],
    "packed": [[Slice(index, 0, 16, 16) for index in range(4)]],
    "split": [[Slice(0, 0, 32, 64)], [Slice(0, 32, 32, 64)]],
    "hybrid": [[Slice(0, 0, 32, 64)], [Slice(0, 32, 32, 64), Slice(1, 0, 20, 20), Slice(2, 0, 3, 3)]],
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("text") / "text")


@pytest.mark.slow
@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("name", CHUNKINGS)
def test_every_chunk_holds_what_the_costs_say(documents, name, again):
    """On a CPU: on each of four stages, the ends among them, computed again or not."""
    run, (layers, keeps) = make_run(documents, ranks=4), AGAIN[again]
    of_kind = run.chunk_costs.keeping_attention if keeps else run.chunk_costs
    chunks = tuple(Chunk(tuple(slices)) for slices in CHUNKINGS[name])
    ids = tuple(torch.zeros((1, chunk.num_tokens), dtype=torch.int64) for chunk in chunks)
    for part, costs in zip(slices_of(run.plan.partition), of_kind.stages, strict=True):
        numerics = numerics_of(run.plan.training, recompute="none")
        stage = make_stage(run.plan.model, run.plan.training, part, numerics, "cpu", on_chunks=True)
        stage.begin_chunks(ChunkBatch(chunks, ids, ids), [layers] * len(chunks), keeps_attention=keeps)
        before, measured = 0, []
        for index, chunk in enumerate(chunks):
            stage.forward(index, torch.zeros((1, chunk.num_tokens, run.plan.model.hidden)))
            measured.append(stage.held.now - before)
            before = stage.held.now
        assert measured == pytest.approx(costs.held_bytes(load_of(chunks), layers).tolist(), rel=0.01)
