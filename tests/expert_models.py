"""Small models with experts, given by numbers."""

from farpipe.core.spec import Model
from farpipe.core.spec.model import Experts, LatentAttention

PLAIN = {"num_experts": 8, "per_token": 2, "ffn_hidden": 48}
DEEP = {"shared_ffn_hidden": 96, "num_dense_layers": 1, "router_bias": 1}
GROUPED = DEEP | {"num_groups": 4, "group_topk": 2}
NARROW = LatentAttention(query_rank=16, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)


def a_model(experts, **fields):
    """A small model of Mixtral's kind with these changes."""
    shape = {"num_layers": 4, "hidden": 64, "num_heads": 4, "ffn_hidden": 96, "vocab_size": 256}
    return Model(**shape | {"num_kv_heads": 2} | fields, experts=Experts(**PLAIN | experts))


MODELS = {
    "mixtral": a_model({}, rotary_base=5e5),
    "qwen3_moe": a_model({"num_dense_layers": 2}, qk_norm=True, head_dim=32),
    "glm4_moe": a_model(DEEP, qkv_bias=True, tied_embeddings=True),
    "deepseek_v3": a_model(GROUPED, latent_attention=NARROW, head_dim=16, num_kv_heads=4),
}
