"""Training on chunks: loss and gradients equal the plain model on whole sequences, whatever the chunks."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from farpipe.core.errors import RunError
from farpipe.core.step import Problem, Rank, Stage
from farpipe.engine.executor.executor import Executor
from farpipe.engine.stages.chunk_attention import (
    KERNELS,
    ChunkAttention,
    KeyValueStore,
    _grads,
    attend,
    attend_in_parts,
)
from farpipe.engine.stages.chunk_stage import ChunkStage, chunk_batch
from farpipe.engine.stages.decoder import Decoder, Numerics, initialise
from farpipe.engine.stages.slices import slices
from farpipe.engine.stages.stage import Boundary
from farpipe.planning.cost.chunk_laws import Law
from farpipe.planning.search import search
from farpipe.planning.workload import Chunk, Slice, followed
from farpipe.planning.workload.cut import Cut, cut_batch
from farpipe.planning.workload.order import chunk_order
from in_process import run_ranks
from planning.workload.test_order import follows_of
from small_models import GPT, LLAMA, even_partition, split_backward

LAW = Law(1e-3, 1.0)
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}
LONGEST = 40
MODELS = {
    "llama": LLAMA.model_copy(update={"num_layers": 4}),
    "gpt": GPT.model_copy(update={"num_layers": 4, "tied_embeddings": False, "max_sequence_length": LONGEST}),
}


def documents_of(model, lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(model.vocab_size, (length,), generator=generator) for length in lengths]


def make_stages(model, num_stages, dtype, seed=7):
    made = []
    for part in slices(even_partition(model, num_stages)):
        module = Decoder(model, part, LONGEST, Numerics(dtype, dtype))
        initialise(module, seed)
        made.append(ChunkStage(module, Boundary((1, LONGEST, model.hidden), dtype)))
    return made


def plain_loss(module, documents, counted=None):
    """Every document alone and whole; the mean over all targets of the step that count."""
    counted = counted or [torch.ones(len(document), dtype=torch.bool) for document in documents]
    total, count = 0.0, sum(int(marks[1:].sum()) for marks in counted)
    for document, marks in zip(documents, counted, strict=True):
        if len(document) > 1:
            logits = module(document[None, :-1])
            losses = functional.cross_entropy(logits[0], document[1:], reduction="none")
            total = total + losses[marks[1:]].sum()
    return total / count


def run(stages, schedule, batch, recomputed, keeps_attention=False):
    num_ranks = len(schedule.ranks)

    def work(peers):
        mine = {s: stage for s, stage in enumerate(stages) if s % num_ranks == peers.rank}
        for number, stage in mine.items():
            stage.begin_chunks(batch, recomputed[number], keeps_attention=keeps_attention)
        Executor(schedule, mine, peers).run(0)

    run_ranks(num_ranks, work)
    return stages[-1].loss


def assert_equal(
    model, lengths, slices_of_longest, *, stages=2, dtype=torch.float64, split=False, layers=0, keeps=False, limit=1000
):
    """One step in chunks against the plain model on whole documents."""
    documents = documents_of(model, lengths)
    chunks = chunks_of(lengths, slices_of_longest, limit)
    order = chunk_order(followed(chunks), (0,) * stages)
    schedule = split_backward(order.schedule()) if split else order.schedule()
    assert_gradients(model, documents, chunks, schedule, [[layers] * len(chunks)] * stages, dtype, keeps=keeps)
    return chunks


def chunks_of(lengths, slices_of_longest, limit=1000):
    longest = max(lengths)
    target = (LAW.pair_s * longest**2 / 2 + LAW.token_s * longest) / slices_of_longest
    return cut_batch(lengths, Cut(target, limit), LAW).chunks()


def assert_gradients(model, documents, chunks, schedule, recomputed, dtype, counted=None, *, keeps=False):
    """Loss and the gradient of every parameter are those of the plain model, and nothing is left behind."""
    made = make_stages(model, len(recomputed), dtype)
    loss = run(made, schedule, chunk_batch(chunks, documents, counted), recomputed, keeps)
    whole = Decoder(model, slices(((0, model.num_layers),))[0], LONGEST, Numerics(dtype, dtype))
    initialise(whole, 7)
    expected = plain_loss(whole, documents, counted)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=LIMITS[dtype])
    found = {name: p.grad for stage in made for name, p in stage.module.named_parameters()}
    largest = max(float(parameter.grad.abs().max()) for parameter in whole.parameters())
    for name, parameter in whole.named_parameters():  # a key's bias has none but for rounding, as softmax ignores it
        scale = max(float(parameter.grad.abs().max()), 1e-3 * largest)
        assert float((found[name] - parameter.grad).abs().max()) <= LIMITS[dtype] * scale, name
    assert all(stage.keys_and_values.num_bytes == 0 for stage in made)
    assert all(stage.store.num_bytes == 0 for stage in made)


MIXED = [40, 37, 23, 9, 5, 3, 2, 2, 1]


AGAIN = {"nothing": (0, False), "all": (1, False), "all but attention": (1, True)}
"""Layers that are recomputed, and whether they keep their attention's results."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_split_hybrid_and_batched_chunks_give_the_gradients_of_whole_sequences(name, again, split, stages):
    layers, keeps = AGAIN[again]
    chunks = assert_equal(MODELS[name], MIXED, 4, stages=stages, split=split, layers=layers, keeps=keeps)
    assert {chunk.kind for chunk in chunks} == {"split", "hybrid", "batched"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_any_number_of_slices_and_both_precisions(count, dtype):
    assert_equal(MODELS["llama"], MIXED, count, dtype=dtype)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.integers(1, LONGEST), min_size=1, max_size=8).filter(lambda lengths: max(lengths) > 1),
    st.integers(1, 6),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_any_batch(lengths, count, layers, split, keeps):
    assert_equal(MODELS["llama"], lengths, min(count, max(lengths)), layers=layers, split=split, keeps=keeps)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_two_stages_on_each_rank_give_the_gradients_of_whole_sequences(name, layers, split):
    model, stages = MODELS[name], 4
    chunks = chunks_of(MIXED, 4)
    assert {chunk.kind for chunk in chunks} == {"split", "hybrid", "batched"}
    schedule = searched(chunks, stages, split=split)
    kinds = {action.kind for order in schedule.ranks for action in order}
    assert kinds == ({"F", "I", "W"} if split else {"F", "B"})
    recomputed = [[layers] * len(chunks)] * stages
    assert_gradients(model, documents_of(model, MIXED), chunks, schedule, recomputed, torch.float64)


def searched(chunks, num_stages, *, split):
    """An order of two ranks that go round the stages, chains kept."""
    each = [float(chunk.num_tokens) for chunk in chunks]
    times = {"forward_s": each, "input_grad_s": each, "weight_grad_s": each, "activation_bytes": 1}
    problem = Problem(
        num_microbatches=len(chunks),
        ranks=(Rank(),) * 2,
        stages=tuple(Stage(rank=stage % 2, **times) for stage in range(num_stages)),
        hops=(None,) * (num_stages - 1),
        follows=followed(chunks),
    )
    schedule = search(problem, 1.0, methods=("greedy",), split=split).schedule
    return split_backward(schedule) if split else schedule


def test_a_layer_that_keeps_its_attention_computes_no_pairs_again():
    """Slices call the kernel of a CPU for themselves and for what is before them, whole sequences of a length once."""
    chunks = [Chunk((Slice(0, 0, 20, 40),)), Chunk((Slice(0, 20, 20, 40), Slice(1, 0, 9, 9), Slice(2, 0, 9, 9)))]
    counted = []
    for layers, keeps in ((0, False), (4, False), (4, True)):
        stage = make_stages(MODELS["llama"], 1, torch.float64)[0]
        batch = chunk_batch(chunks, documents_of(MODELS["llama"], [40, 9, 9]))
        stage.begin_chunks(batch, [layers] * 2, keeps_attention=keeps)
        with KernelCalls() as calls:
            for index in (0, 1):
                stage.forward(index, None)
            for index in (1, 0):
                stage.backward(index, None)
        counted.append(calls.count)
    of_slices, of_whole = 4 * (1 + 2), 4  # of four layers
    assert counted == [2 * of_slices + of_whole, 3 * of_slices + 2 * of_whole, of_slices + of_whole]


class KernelCalls(TorchDispatchMode):
    """Counts calls of attention's forward kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in KERNELS
        return func(*args, **(kwargs or {}))


def test_packed_sequences_do_not_see_each_other():
    """Another document in the same chunk changes nothing of a document's loss."""
    model = MODELS["llama"]
    one, other, third = documents_of(model, [6, 5, 5])
    losses = []
    for second in (other, third):
        chunks = cut_batch([6, 5], Cut(1e9, 100), LAW).chunks()
        assert len(chunks) == 1
        stage = make_stages(model, 1, torch.float64)[0]
        stage.begin_chunks(chunk_batch(chunks, [one, second]))
        x = stage._compute(0, stage._tokens(0))
        losses.append(x[0, :6].detach())
    assert torch.equal(*losses)


def test_prompts_are_read_and_not_trained_on():
    """Also where a slice of a split sequence has no target that counts."""
    documents = documents_of(MODELS["llama"], MIXED)
    counted = [torch.arange(len(document)) >= min(25, len(document) // 2) for document in documents]
    chunks = chunks_of(MIXED, 4)
    order = chunk_order(followed(chunks), (0, 0))
    recomputed = [[1] * len(chunks)] * 2
    assert_gradients(MODELS["llama"], documents, chunks, order.schedule(), recomputed, torch.float64, counted)


@pytest.mark.parametrize("grouped", [False, True])
def test_sequences_of_one_length_share_a_call_and_see_only_themselves(grouped, monkeypatch):
    calls, plain = [], functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or plain(*a, **k))
    torch.manual_seed(0)
    sizes = [6, 4, 4, 4, 1, 1]
    rows = [torch.randn(1, heads, sum(sizes), 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    rows = rows if grouped else [rows[0], rows[0] + 1, rows[0] * 2]
    chunk = Chunk(tuple(Slice(index, 0, size, size) for index, size in enumerate(sizes)))
    found = ChunkAttention(KeyValueStore(), "0", chunk, grouped)(*rows)
    assert len(calls) == 3
    pieces = zip(*(torch.split(row, sizes, -2) for row in rows), strict=True)
    alone = torch.cat([plain(*piece, is_causal=True, enable_gqa=grouped) for piece in pieces], -2)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)
    weights = torch.randn_like(found)
    leaves = [row for row in rows if row.is_leaf]
    grads = [torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True) for out in (found, alone)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("context", [0, 1, 7])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_behind_a_context_is_the_end_of_the_whole(context, grouped, monkeypatch):
    monkeypatch.setattr("farpipe.engine.stages.chunk_attention.ROWS_AT_ONCE", 3)
    torch.manual_seed(0)
    key, value = (torch.randn(1, 2, context + 8, 4, dtype=torch.float64) for _ in range(2))
    query = torch.randn(1, 4 if grouped else 2, context + 8, 4, dtype=torch.float64)
    whole = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    assert torch.allclose(attend(query[:, :, context:], key, value, is_grouped=grouped), whole[:, :, context:])


@pytest.mark.parametrize("context", [0, 1, 40])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_in_two_parts_and_its_gradients_are_those_under_a_mask(context, grouped):
    torch.manual_seed(0)
    key, value = (torch.randn(1, 2, context + 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    query = torch.randn(1, 4 if grouped else 2, 9, 4, dtype=torch.float64, requires_grad=True)
    rows, grad = (query, key, value), torch.randn_like(query)
    masked = attend(*rows, is_grouped=grouped)
    with torch.no_grad():
        assert torch.allclose(attend_in_parts(*rows)[0], masked, rtol=1e-12, atol=1e-14)
        found = _grads(grad, rows, is_grouped=grouped)
    for one, plain in zip(found, torch.autograd.grad(masked, rows, grad), strict=True):
        assert torch.allclose(one, plain, rtol=1e-12, atol=1e-13)


def test_keys_and_values_are_let_go_slice_by_slice():
    model = MODELS["llama"]
    chunks = cut_batch([30], Cut(10.0, 100), LAW).chunks()
    count = len(chunks)
    assert count > 2
    stage = make_stages(model, 1, torch.float64)[0]
    stage.begin_chunks(chunk_batch(chunks, documents_of(model, [30])))
    per_token = model.num_layers * 2 * model.kv_hidden * 8
    for index in range(count):
        stage.forward(index, None)
    assert stage.keys_and_values.num_bytes == 30 * per_token
    for index in reversed(range(count)):
        stage.backward(index, None)
        left = sum(chunk.num_tokens for chunk in chunks[:index])
        assert stage.keys_and_values.num_bytes == 2 * left * per_token


def test_a_sequence_beyond_the_positions_is_told():
    model = MODELS["llama"]
    chunks = cut_batch([LONGEST + 5], Cut(1e9, 100), LAW).chunks()
    stage = make_stages(model, 1, torch.float64)[0]
    stage.begin_chunks(chunk_batch(chunks, documents_of(model, [LONGEST + 5])))
    with pytest.raises(RunError, match="sequence_length is where documents must be cut"):
        stage.forward(0, None)


def test_chains_of_the_tests_are_those_of_chunks():
    chunks = cut_batch([30, 20], Cut(10.0, 100), LAW).chunks()
    counts = [sum(part.sequence == s for chunk in chunks for part in chunk.slices) for s in (0, 1)]
    assert followed(chunks) == follows_of(counts)


def test_a_model_learns_the_same_in_chunks_as_on_whole_documents():
    """Five steps of AdamW, every step another batch with other chunks."""
    model, num_steps = MODELS["llama"], 5
    stages = make_stages(model, 2, torch.float64)
    whole = Decoder(model, slices(((0, model.num_layers),))[0], LONGEST, Numerics(torch.float64, torch.float64))
    initialise(whole, 7)
    apart = [parameter for stage in stages for parameter in stage.module.parameters()]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2) for parameters in (apart, whole.parameters())]
    for step in range(num_steps):
        lengths = torch.randint(1, LONGEST + 1, (6,), generator=torch.Generator().manual_seed(step)).tolist()
        documents = documents_of(model, lengths, step)
        chunks = cut_batch(lengths, Cut(30.0 + 5 * step, 1000), LAW).chunks()
        order = chunk_order(followed(chunks), (0, 0))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = run(stages, order.schedule(), chunk_batch(chunks, documents), [[step % 3] * len(chunks)] * 2)
        expected = plain_loss(whole, documents)
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-9)
