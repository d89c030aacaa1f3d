"""What forwards hold for their backwards is counted once, however many share it, until nobody needs it."""

import torch

from farpipe.runtime.chunk_stage import chunk_batch
from farpipe.runtime.held_bytes import HeldBytes
from farpipe.sequences.cut import Cut, make_chunks
from runtime.test_chunk_stage import LAW, MODELS, documents_of, make_stages


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
    chunks = make_chunks([30, 5], Cut(10.0, 100), LAW)
    peaks = []
    for layers in (0, 2):
        stage = make_stages(model, 1, torch.float64)[0]
        stage.begin_chunks(chunk_batch(chunks, documents_of(model, [30, 5])), [layers] * len(chunks))
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
    assert peaks[1] < 0.7 * peaks[0], "layers that are computed again hold their input, keys and values only"
