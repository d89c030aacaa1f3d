"""Low-rank adapters beside frozen weights, and the linear maps of a layer that may get them."""

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from farpipe.core.spec.part import Count, Part, Positive, Share, fault
from farpipe.core.strict import nearest

if TYPE_CHECKING:
    from farpipe.core.spec.model import Model

_ATTENTION: Final = ("linear_qkv", "linear_proj")
_LATENT: Final = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
_MLP: Final = ("linear_fc1", "linear_fc2")
PARTS: Final = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Maps of transformers' classes by those of Megatron-Core, which has some of them in one."""
MODULES: Final = (*_ATTENTION, *_MLP, *_LATENT[:-1], "linear_q_proj", *(part for own in PARTS.values() for part in own))
"""Linear maps of a layer by Megatron-Core's names: query, key and value in one; attention's output; both of the MLP, or
of the experts; those of latent attention. And by transformers' names, which has them apart."""


def _list(value: Any) -> Any:
    return value.split() if isinstance(value, str) else value


class Lora(Part):
    """LoRA (Hu et al., arXiv 2106.09685): each of `target_modules` of every layer gets two matrices, from its input to
    `rank` numbers and on to its output; all other weights are frozen."""

    rank: Count
    """Width between the two matrices of an adapter (peft's `r`, Megatron-Bridge's `dim`)."""
    target_modules: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1)] | None,
        BeforeValidator(_list, json_schema_input_type=list[str] | str),
        Field(exclude_if=lambda names: names is None),
    ] = None
    """Linear maps that get an adapter. By peft's names: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`,
    `down_proj`. By Megatron-Core's, with one adapter for several maps in one: `linear_qkv`, `linear_proj`,
    `linear_fc1`, `linear_fc2`. Those of the MLP are of all experts. Latent attention has `linear_q_down_proj`,
    `linear_q_up_proj` (or `linear_q_proj`), `linear_kv_down_proj` and `linear_kv_up_proj`. Default: all, each apart."""
    alpha: Annotated[Positive | None, Field(exclude_if=lambda alpha: alpha is None)] = None
    """An adapter's output is scaled by `alpha / rank` (peft's `lora_alpha`). Default: `rank`, a scale of 1."""
    dropout: Share = 0.0
    """Share of the adapters' inputs that is dropped out."""
    base_weights: Literal["same", "fp8", "nf4"] = "same"
    """Format of the layers' frozen weights: `"same"` (as `precision`, and what `matmul` keeps), `"fp8"` (once, without
    a transpose), `"nf4"` (QLoRA, double quantization). Planned only but for `"same"`."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for module in self.target_modules or ():
            if module not in MODULES:
                hint = nearest(module, MODULES) or f"; known: {', '.join(MODULES)}"
                raise fault(f"there is no module {module[:60]!r}{hint}", "target_modules")
            if twice := [part for part in PARTS.get(module, ()) if part in (self.target_modules or ())]:
                raise fault(f"{module} has {twice[0]} in it; name one of them", "target_modules")
        return self

    def adapts(self, module: str) -> bool:
        """True if a map of Megatron-Core's name `module`, or a part of it, gets an adapter."""
        named = self.target_modules
        return named is None or module in named or bool(set(PARTS.get(module, ())) & set(named))

    @property
    def scaled(self) -> float:
        """`alpha`, or what stands for it."""
        return float(self.rank) if self.alpha is None else self.alpha

    @property
    def base_bytes(self) -> float | None:
        """Bytes of one frozen weight of a layer; None: those of the training's precision. 4 bit have an 8-bit scale for
        64 numbers, and a 32-bit one for 256 of these (arXiv 2305.14314, section 3)."""
        return {"same": None, "fp8": 1.0, "nf4": 1 / 2 + 1 / 64 + 4 / (64 * 256)}[self.base_weights]


def attention_modules(model: "Model") -> tuple[str, ...]:
    """Names of the linear maps of attention, in the order in which a layer has them."""
    if model.latent_attention is None:
        return _ATTENTION
    return _LATENT if model.latent_attention.query_rank else ("linear_q_proj", *_LATENT[2:])


def possible_modules(model: "Model") -> tuple[str, ...]:
    """List the modules that the layers of `model` have."""
    whole = (*attention_modules(model), *_MLP)
    apart = [part for module in whole for part in PARTS.get(module, ()) if part != "gate_proj" or model.gated_mlp]
    return (*whole, *apart)
