"""Low-rank adapters beside frozen weights: their products, traffic, collectives and parameters.

A frozen linear map has no weight gradient, and nothing is kept for one; its input gradient stays. An adapter beside it
multiplies [tokens, depth] x [depth, rank] and [tokens, rank] x [rank, columns], and both gradients of each (LoRA, arXiv
2106.09685), in the training's own precision; its result is scaled and added to the map's, its input gradient to the
map's. Adapters of one layer are counted as equal, so every layer has them.
"""

from dataclasses import replace

from farpipe.core.spec import Lora, Model, Training
from farpipe.core.spec.lora import PARTS, attention_modules
from farpipe.planning.cost import flops
from farpipe.planning.cost.flops import Product
from farpipe.planning.cost.layout import Layout


def adapted(
    model: Model, lora: Lora, tokens: float, tensor: int = 1, expert: int = 1, expert_tensor: int | None = None
) -> tuple[Product, ...]:
    """The frozen maps of one layer that an adapter is beside; arguments as for `flops.mlp_linear`.

    Query, key and value, and gate and up, are one map each by Megatron-Core's names, and several by transformers'.
    """
    mlp = flops.mlp_linear(model, tokens, tensor, expert, expert_tensor)
    if model.experts is not None:
        mlp = mlp[1:]  # the router has none
    attention = zip(attention_modules(model), flops.attention_linear(model, tokens, tensor), strict=True)
    both = zip(("linear_fc1", "linear_fc2") * (len(mlp) // 2), mlp, strict=True)
    return tuple(part for name, product in (*attention, *both) for part in _adapted_parts(model, lora, name, product))


def _adapted_parts(model: Model, lora: Lora, name: str, whole: Product) -> list[Product]:
    """The map itself where an adapter is beside all of it, or its parts that have one each."""
    named = lora.target_modules
    if named is not None and name in named:
        return [whole]
    heads, keys = model.attention_hidden, model.kv_hidden
    widths = {"q_proj": heads, "k_proj": keys, "v_proj": keys} if name == "linear_qkv" else {}
    parts = [part for part in PARTS.get(name, ()) if part != "gate_proj" or model.gated_mlp]
    if not parts:
        return [whole] if named is None else []
    every = sum(widths.get(part, 1) for part in parts)
    return [
        replace(whole, columns=whole.columns * widths.get(part, 1) / every)
        for part in parts
        if named is None or part in named
    ]


def shared_inputs(base: tuple[Product, ...]) -> tuple[Product, ...]:
    """Those of the maps `base` that have an input of their own: parts of one map share theirs."""
    found: list[Product] = []
    for at in base:
        if not found or (at.rows, at.depth, at.count) != (found[-1].rows, found[-1].depth, found[-1].count):
            found.append(at)
    return tuple(found)


def layout_adapted(model: Model, lora: Lora, tokens: float, layout: Layout) -> tuple[Product, ...]:
    """The same on one device of `layout`."""
    return adapted(model, lora, tokens, layout.tensor, layout.expert, layout.expert_tensor)


def products(lora: Lora, base: tuple[Product, ...]) -> tuple[Product, ...]:
    """Both products of the adapter beside each of `base`."""
    return tuple(
        product
        for at in base
        for product in (
            Product(at.rows, lora.rank, at.depth, at.count),
            Product(at.rows, at.columns, lora.rank, at.count),
        )
    )


def passes(lora: Lora, base: tuple[Product, ...]) -> tuple[float, float, float]:
    """Numbers that cross memory for the adapters: in the forward, the input gradient and the weight gradient.

    Each of three products of both matrices reads its factors and writes its result. Besides, forward: dropout reads and
    writes the input, scaling the result, and the sum reads two and writes one. Backward: scaling the gradient, the sum
    of both input gradients, and the dropout of one.
    """
    dropped = 2 if lora.dropout else 0
    inputs = sum(at.count * at.rows * at.depth for at in base)
    results = sum(at.count * at.rows * at.columns for at in base)
    each = sum(product.elements for product in products(lora, base))
    return each + dropped * inputs + 5 * results, each + 2 * results + (3 + dropped) * inputs, each


def trained_params(model: Model, training: Training, num_layers: int) -> tuple[float, float]:
    """Trained parameters of `num_layers` layers of `model`: of the adapters, and those of them that experts have."""
    if training.lora is None:
        return float(num_layers * model.num_layer_params), float(num_layers * model.num_expert_params)
    rank, whole, of_experts = training.lora.rank, 0.0, 0.0
    for at in adapted(model, training.lora, 1.0):
        size = num_layers * rank * at.count * (at.depth + at.columns)
        whole += size
        of_experts += size if at.count > 1 else 0.0
    return whole, of_experts


def trained_model_params(model: Model, training: Training) -> float:
    """Trained parameters of the whole model: all, without adapters."""
    if training.lora is None:
        return float(model.num_params)
    return sum(share * trained_params(kind, training, model.num_layers)[0] for share, kind in model.kinds())
