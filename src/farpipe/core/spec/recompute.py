"""Operations of a layer whose results a stage does not keep: its backward pass computes them again."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BeforeValidator

from farpipe.core.strict import nearest

if TYPE_CHECKING:
    from farpipe.core.spec.model import Model

OPERATIONS: Final = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Operations by the names of Megatron-LM's ``--recompute-modules``: scores and softmax of attention, both norms, the
maps of latent attention out of its narrow vectors, the MLP, all of the experts, their nonlinearity alone, the experts
that all tokens share."""
OF_TRANSFORMERS: Final = ("core_attn", "layernorm", "mlp", "moe")
"""Operations that the engine can recompute by themselves in models that transformers computes."""
_INSIDE_MOE: Final = ("moe_act", "shared_experts")


def _settled(value: Any, whole: tuple[str, ...] = ("none", "full", "op")) -> str:
    """`value` in the one spelling of its set: no operation twice, in the order of OPERATIONS."""
    if isinstance(value, str) and value in whole:
        return value
    words, known = value.split() if isinstance(value, str) else [], (*OPERATIONS, "selective")
    wrong = [word for word in words if word not in known]
    if not words or wrong:
        expected = ", ".join(map(repr, (*whole, "selective")))
        hint = nearest(wrong[0], (*known, *whole)) if wrong else ""
        raise ValueError(f"expected {expected} or some of {', '.join(OPERATIONS)}, found {value!r:.60}{hint}")
    return spelled("core_attn" if word == "selective" else word for word in words)


Recompute = Annotated[str, BeforeValidator(_settled)]
"""``none``; ``full``: all of a layer but its input; ``op``: all but attention and every second product, torchtitan's
``selective_ac_option``; or names of OPERATIONS with a space between them. ``selective`` is the short name of
``core_attn``, attention's scores, which is Megatron-LM's default."""

RecomputeChoice = Annotated[str, BeforeValidator(lambda value: _settled(value, ("auto", "none", "full", "op")))]
"""The same, or ``auto``."""


def spelled(operations: Iterable[str]) -> str:
    """The Recompute of a set of operations."""
    chosen = set(operations)
    if "moe" in chosen:
        chosen -= set(_INSIDE_MOE)
    return "selective" if chosen == {"core_attn"} else " ".join(o for o in OPERATIONS if o in chosen) or "none"


def operations_of(recompute: str) -> tuple[str, ...]:
    """The names of what `recompute` selects; () of ``none``, and of ``full``, which is more than all of them."""
    if recompute in ("none", "full", "auto"):
        return ()
    return ("core_attn",) if recompute == "selective" else tuple(recompute.split())


def possible_operations(model: "Model") -> tuple[str, ...]:
    """List the OPERATIONS that the layers of `model` have."""
    at = model.experts
    missing = {
        "mla_up_proj": model.latent_attention is None,
        "mlp": at is not None,
        "moe": at is None,
        "moe_act": at is None,
        "shared_experts": at is None or not at.shared_ffn_hidden,
    }
    if model.module is not None:
        return ()
    known = OPERATIONS if model.hugging_face is None else OF_TRANSFORMERS
    return tuple(operation for operation in known if not missing.get(operation))


def recomputed_of(model: "Model", recompute: str) -> tuple[str, ...]:
    """The names of what `recompute` selects that layers of `model` have; dense ones have no experts' operations."""
    return tuple(name for name in operations_of(recompute) if name in (*possible_operations(model), "op"))
