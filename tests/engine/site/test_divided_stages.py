"""Stages divided over processes of a site by FSDP2 and tensor parallelism: loss and gradients of the whole model."""

import re

import pytest

from chosen import chosen
from farpipe.planning.planner.engine import WITH_CONTEXT, WITH_TENSOR
from site_processes import run_processes

ORDERS = ("1f1b", "zb-h1", "zb-2p")
NAMES = (
    "llama",
    "qwen3",
    "gemma3_text",
    "olmo2",
    "phi",
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "gpt2",
)
FLOAT32_PARTS = ("gemma3_text", "deepseek_v3")
"""Norms whose gains are multiplied in float32, a router that computes so: sums over other tokens round otherwise."""


DEGREES = {2: ((2, 1, 1), (1, 2, 1)), 4: ((2, 2, 1), (4, 1, 1))}
"""(data, tensor, context) by number of processes."""


def cases_of(num_processes):
    """(name, degrees, order, options): every name, with orders and options in turn, and one in all orders."""
    options = [{}, {"recompute": "full"}, {"reshard_after_forward": True}, {"zero": 2}]
    options.append({"zero": 3, "reshard_after_forward": True, "recompute": "full"})
    shared, divided = DEGREES[num_processes]
    if num_processes == 2:
        pairs = [(name, shared) for name in NAMES] + [(name, divided) for name in WITH_TENSOR]
    else:
        pairs = [(name, shared) for name in WITH_TENSOR[:5]] + [("gpt2", divided)]
    for at, (name, degrees) in enumerate(pairs):
        yield name, degrees, ORDERS[at % 3], options[at % (5 if degrees[0] > 1 else 2)]
    whole = {"zero": 3, "reshard_after_forward": True}
    if num_processes == 2:
        yield from (("llama", degrees, method, whole) for degrees in DEGREES[2] for method in ORDERS)
    else:
        yield from (("llama", degrees, "zb-2p", whole) for degrees in DEGREES[4])
        yield from (("llama", divided, method, whole | {"hybrid": True}) for method in ORDERS)


def shared_sequences(num_processes):
    """The same where processes share sequences; with windows of attention and without, grouped heads, experts."""
    recomputed = [{"recompute": "full"}, {}, {"recompute": "core_attn"}]
    if num_processes == 2:
        for at, name in enumerate(WITH_CONTEXT):
            yield name, (1, 1, 2), ORDERS[at % 3], recomputed[at % 2]
        whole = {"zero": 3, "reshard_after_forward": True}
        yield "qwen3", (1, 1, 2), "zb-2p", recomputed[2] | whole
        return
    for at, name in enumerate(("llama", "qwen3", "mistral", "gemma3_text")):
        yield name, (1, 2, 2), ORDERS[at % 3], recomputed[at % 3]
    yield from ((name, (2, 1, 2), "zb-h1", {}) for name in ("mixtral", "qwen3_moe"))
    yield "mixtral", (1, 1, 4), "zb-2p", recomputed[0]


@pytest.mark.slow
@pytest.mark.parametrize("cases_of", [cases_of, shared_sequences])
@pytest.mark.parametrize("num_processes", chosen([2, 4], 0))
def test_divided_stages_have_the_gradients_of_the_whole_in_every_order(num_processes, cases_of):
    cases = list(cases_of(num_processes))
    found = run_processes(num_processes, [("errors", *case) for case in cases])
    for case, row in zip(cases, found, strict=True):
        limit = 1e-6 if case[0] in FLOAT32_PARTS else 1e-10
        assert row.get("error", 1.0) <= limit, (case, row)


@pytest.mark.slow
def test_partial_gradients_are_settled_before_anyone_takes_a_norm():
    """Gains of norms, replicated, of which each process has seen its own tokens."""
    (found,) = run_processes(2, [("norms", "qwen3", {})])
    assert found["settled"] == pytest.approx(found["whole"], rel=1e-12)
    assert all(name.endswith("norm.weight") for name in found["names"]), "no process has all of a matrix's gradient"
    assert abs(found["unsettled"] / found["whole"] - 1) > 1e-6, "the remedy is needed"


@pytest.mark.slow
def test_twins_check_the_very_class_before_they_train():
    cases = [("checks", name, 2, {}) for name in ("qwen3", "gemma3_text", "phi")]
    cases += [("checks", "qwen3", 2, {"trap": trap}) for trap in ("norms summed again", "q_norm")]
    shared = {"context": 2}
    cases += [("checks", name, 2, shared) for name in ("gemma3_text", "gpt2", "deepseek_v3", "gpt_oss", "qwen3_next")]
    cases += [("checks", "gpt2", 2, {})]
    said = [row["said"] for row in run_processes(2, cases)]
    assert said[:3] == said[5:8] == [""] * 3
    assert "has another gradient of " in said[3]
    assert "norm.weight than the whole" in said[3]
    assert re.search(r"has another gradient of \S+\.[qk]_norm\.weight than the whole", said[4])
    assert "is of kind 'eager', around which processes can't exchange tokens; say layout.context = 1" in said[8]
    assert "linear_attn" in said[9], "attention that is in no registry, over a part of the tokens only"
    assert said[9].endswith("off); say layout.context = 1")
    assert "transformers has no plan for it; say layout.tensor = 1" in said[10]


NOT_ON_CHUNKS = {
    "mistral": "attention with sliding_window",
    "gemma3_text": "attention with sliding_window",
    "deepseek_v3": "heads of unlike widths",
    "gpt2": "more than one input by position",
}


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "names"), chosen([(2, WITH_CONTEXT), (4, ("llama", "qwen3_moe"))], 0))
def test_chunks_that_processes_share_have_the_gradients_of_the_whole(num_processes, names):
    """Slices of 16 and 8 tokens and documents of 5 and 9, so that processes have unlike numbers of tokens."""
    options = {"context": num_processes, "on_chunks": True}
    found = run_processes(num_processes, [("checks", name, num_processes, options) for name in names])
    for name, row in zip(names, found, strict=True):
        if name in NOT_ON_CHUNKS:
            assert NOT_ON_CHUNKS[name] in row["said"]
        else:
            assert not row["said"], name


@pytest.mark.slow
def test_the_check_of_shared_chunks_finds_tokens_out_of_order():
    options = {"context": 2, "on_chunks": True, "trap": "tokens out of order"}
    (found,) = run_processes(2, [("checks", "qwen3", 2, options)])
    assert "qwen3" in found["said"]
    assert found["said"].endswith("; say layout.context = 1")
