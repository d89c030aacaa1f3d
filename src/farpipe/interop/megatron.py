"""Settings of Megatron-LM (and NeMo, Megatron-Bridge) as a job.

Defaults are those of Megatron-Core 0.15: layer norm, learned positions, tied embeddings and biases unless the options
say otherwise (megatron/training/arguments.py).
"""

import re
from typing import Any, Final

from farpipe.core.errors import InputError
from farpipe.interop.kinds import as_count, as_flag, as_layers, as_size
from farpipe.interop.known_options import known_options
from farpipe.interop.megatron_names import settings_of_script, settings_of_tables
from farpipe.interop.megatron_training import put_training
from farpipe.interop.settings import Draft, Plain, Setting, Settings
from farpipe.interop.vocabulary import put_vocabulary


def read_script_of_megatron(text: str, source: str, known: dict[str, str] | None = None) -> Draft:
    """The job of a shell script or a list of options; `known` has values for variables that come from outside."""
    return job_of_settings(settings_of_script(text, source, known), "Megatron-LM")


def read_tables_of_megatron(data: Any, source: str, form: str = "Megatron-LM") -> Draft:
    """The job of a YAML file, already parsed."""
    return job_of_settings(settings_of_tables(data, source), form)


_MODEL: Final[Plain] = {
    "num_layers": ("num_layers", as_size),
    "hidden": ("hidden_size", as_size),
    "num_heads": ("num_attention_heads", as_size),
    "head_dim": ("kv_channels", as_size),
}


def job_of_settings(settings: Settings, form: str, *options: str) -> Draft:
    """The job of settings by Megatron-LM's names; `options`: the frameworks of the other options that it may have."""
    draft = Draft(form, own_method="interleaved")
    _devices(settings, draft)
    _layout(settings, draft)
    _model(settings, draft)
    put_training(settings, draft)
    draft.close(settings, known_options(*(options or ("megatron",))))
    return draft


def _devices(settings: Settings, draft: Draft) -> None:
    per_machine = ("nproc_per_node", "gpus_per_node", "devices", "num_gpus", "gres", "ntasks_per_node")
    machines = ("nnodes", "nodes", "num_nodes", "N")
    each = next((n for n in [settings.take(name, _num_gpus) for name in per_machine] if n), None)
    count = settings.first(machines, as_count)
    if each is not None:
        draft.num_devices_per_machine = Setting(each, settings.origin(*per_machine))
    if each is not None and count is not None:
        draft.num_devices = Setting(each * count, f"{settings.origin(*machines)} x {settings.origin(*per_machine)}")
    elif (world := settings.take("world_size", as_count)) is not None:
        draft.num_devices = Setting(world, settings.origin("world_size"))


def _num_gpus(value: Any) -> int:
    """``8``, or ``gpu:h100:8`` of Slurm."""
    return as_count(str(value).rpartition(":")[2] or value)


def _layout(settings: Settings, draft: Draft) -> None:
    names = {
        "pipeline": "pipeline_model_parallel_size",
        "tensor": "tensor_model_parallel_size",
        "context": "context_parallel_size",
        "expert": "expert_model_parallel_size",
    }
    for key, name in names.items():
        degree = settings.take(name, as_size, default=None if settings.has(name) else 1)
        draft.put("layout", key, degree, settings.origin(name))
        if degree is None:
            draft.unreadable.append(f"layout.{key}")
    name = "expert_tensor_parallel_size"
    if settings.take(name, as_size, draft.degree("tensor")) != draft.degree("tensor") and draft.degree("expert") > 1:
        settings.change(name, "experts are divided over as many tensor-parallel devices as the layers")
    if draft.degree("context") > 1 and "ds-sequence" in settings.origin("context_parallel_size"):
        draft.put("layout", "context_exchange", "ulysses", settings.origin("context_parallel_size"))
    if settings.has("cp_comm_type") and draft.degree("context") > 1:
        kinds = settings.take("cp_comm_type", lambda kind: kind if isinstance(kind, str) else kind[0])
        exchange = "ulysses" if kinds == "a2a" else "ring"
        draft.put("layout", "context_exchange", exchange, settings.origin("cp_comm_type"))
    _stages(settings, draft)
    pipeline, virtual = draft.degree("pipeline"), draft.degree("virtual")
    if pipeline > 1:
        draft.put("schedule", "method", "interleaved" if virtual > 1 else "1f1b", "Megatron-LM's schedule")


def _stages(settings: Settings, draft: Draft) -> None:
    """Stages on each rank and layers of each stage."""
    num_layers = settings.take("num_layers", as_size)
    pipeline = draft.degree("pipeline")
    layout = settings.take("pipeline_model_parallel_layout", _layout_text)
    virtual = settings.take("num_virtual_stages_per_pipeline_rank", as_size)
    each = settings.take("num_layers_per_virtual_pipeline_stage", as_size)
    origin = settings.origin("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
    if num_layers is None:
        return
    if layout is not None:
        layers = layers_of_layout(layout)
        virtual, origin = max(1, len(layers) // pipeline), settings.origin("pipeline_model_parallel_layout")
    else:
        if each and num_layers % (pipeline * each):
            raise InputError(
                f"{settings.source}: {origin}: {num_layers} layers are no multiple of {pipeline} ranks x {each} layers "
                "a stage"
            )
        virtual = virtual or (num_layers // (pipeline * each) if each else 1)
        layers = _even_layers(settings, num_layers, pipeline, virtual)
    draft.put("layout", "virtual", virtual, origin)
    if len(layers) > 1 and sum(layers) == num_layers:
        names = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "num_layers")
        draft.put("layout", "layers", layers, settings.origin(*names))


def _layout_text(value: Any) -> str:
    """A layout as text, also where Megatron-Bridge has a list of the names of each stage's parts."""
    if not isinstance(value, list):
        return str(value)
    return "|".join("t" * [str(part) for part in stage].count("decoder") for stage in value)


def layers_of_layout(text: str) -> list[int]:
    """Layers of each stage of a ``--pipeline-model-parallel-layout``, such as ``Et*3|(tt|)*2tL``."""
    text = re.sub(r"[\s,'\"]", "", text)
    while match := re.search(r"\(([^()]*)\)(?:\*(\d+))?|([A-Za-z|])\*(\d+)", text):
        inner = match[1] if match[1] is not None else match[3]
        text = text[: match.start()] + inner * int(match[2] or match[4] or 1) + text[match.end() :]
    return [stage.count("t") for stage in text.split("|")]


def _even_layers(settings: Settings, num_layers: int, pipeline: int, virtual: int) -> list[int]:
    """Equal stages; fewer layers in the first and the last where an option says so."""
    num_stages = pipeline * virtual
    if num_stages > num_layers:
        raise InputError(f"{settings.source}: {pipeline} ranks x {virtual} stages are more than {num_layers} layers")
    first = settings.take("decoder_first_pipeline_num_layers", as_count)
    last = settings.take("decoder_last_pipeline_num_layers", as_count)
    head = settings.flag("account_for_embedding_in_pipeline_split")
    tail = settings.flag("account_for_loss_in_pipeline_split")
    if first is None and last is None:
        share = (num_layers + head + tail) // num_stages
        layers = [share] * num_stages
        layers[0] -= head
        layers[-1] -= tail
        return layers
    ends = (first is not None) + (last is not None)
    share = (num_layers - (first or 0) - (last or 0)) // max(1, pipeline - ends)
    per_rank = [share if first is None else first, *[share] * (pipeline - 2), share if last is None else last]
    return [per_rank[stage % pipeline] // virtual for stage in range(num_stages)]


_GATES: Final = ("swiglu", "quick_geglu", "geglu", "reglu")
"""Switches of MLPs with a gate, also those of Megatron-LLM and of Megatron-DeepSpeed."""


def _model(settings: Settings, draft: Draft) -> None:
    draft.copy(settings, "model", _MODEL)
    hidden = draft.value("model", "hidden")
    unit = [str(settings.take(name, default="")) for name in ("activation", "glu_activation")]
    switches = [settings.flag(name) for name in _GATES]
    gated = any(switches) or any(text.endswith(("swiglu", "geglu")) or text == "reglu" for text in unit)
    groups = settings.take("num_query_groups", as_count)
    has_switch = settings.has("group_query_attention") or settings.origin("hidden_size").startswith("--")
    is_switched = settings.flag("group_query_attention") or not has_switch
    if groups is not None and is_switched:  # files of NeMo have no switch
        draft.put("model", "num_kv_heads", groups, settings.origin("num_query_groups"))
    elif settings.has("num_key_value_heads"):  # Megatron-DeepSpeed
        groups = settings.take("num_key_value_heads", as_count)
        draft.put("model", "num_kv_heads", groups, settings.origin("num_key_value_heads"))
    if settings.take("attention_head_type", _is_multi_query):  # BigCode's Megatron-LM
        draft.put("model", "num_kv_heads", 1, settings.origin("attention_head_type"))
    draft.put("model", "ffn_hidden", _ffn_hidden(settings, hidden, gated), settings.origin("ffn_hidden_size"))
    draft.put("model", "gated_mlp", gated, settings.origin(*_GATES, "activation"))
    put_vocabulary(settings, draft)
    _norms_and_biases(settings, draft)
    _positions(settings, draft)
    _experts(settings, draft)
    _latent_attention(settings, draft)
    _windows(settings, draft)
    draft.put("model", "mtp_num_layers", settings.take("mtp_num_layers", as_count), settings.origin("mtp_num_layers"))


def _is_multi_query(value: Any) -> bool:
    return {"multiquery": True, "multihead": False}[str(value)]


def _ffn_hidden(settings: Settings, hidden: int | None, gated: bool) -> int | None:
    given: int | None = settings.take("ffn_hidden_size", as_count)
    if given is not None or hidden is None:
        return given
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _norms_and_biases(settings: Settings, draft: Draft) -> None:
    shared = settings.take("share_embeddings_and_output_weights", as_flag, default=True)
    tied = shared and not settings.flag("untie_embeddings_and_output_weights")
    origin = settings.origin("untie_embeddings_and_output_weights", "share_embeddings_and_output_weights")
    draft.put("model", "tied_embeddings", tied, origin)
    norm = settings.take("normalization", str, "LayerNorm").lower()
    draft.put("model", "norm", "rmsnorm" if norm.startswith("rms") else "layernorm", settings.origin("normalization"))
    bias = settings.take("add_bias_linear", as_flag, settings.take("bias", as_flag, default=True))
    bias = bias and not settings.flag("disable_bias_linear")
    draft.put("model", "bias", bias, settings.origin("disable_bias_linear", "add_bias_linear", "bias"))
    if settings.flag("add_qkv_bias") and not bias:
        draft.put("model", "qkv_bias", True, settings.origin("add_qkv_bias"))
    if settings.flag("qk_layernorm"):
        draft.put("model", "qk_norm", True, settings.origin("qk_layernorm"))


_WITHOUT_TABLE: Final = ("rope", "rotary", "yarn", "mrope", "none", "alibi")
"""Kinds of positions that take no table of their own."""


def _positions(settings: Settings, draft: Draft) -> None:
    kind = settings.take("position_embedding_type", str, "learned_absolute")
    rotary = settings.flag("use_rotary_position_embeddings") or kind in _WITHOUT_TABLE
    origin = settings.origin("position_embedding_type", "use_rotary_position_embeddings")
    if kind == "alibi":
        draft.notes.append(f"{origin}: the bias of ALiBi is counted as rotary positions are: no weights")
    draft.put("model", "positions", "rotary" if rotary else "learned", origin)
    names = ["max_position_embeddings", *(["seq_length"] * (not settings.origin("hidden_size").startswith("--")))]
    rows = next((rows for name in names if (rows := settings.take(name, as_count))), None)
    if not rotary:  # in Megatron-Bridge the table has as many rows as the sequence is long
        draft.put("model", "max_sequence_length", rows, settings.origin(*names))
    base = settings.take("rotary_base", float)
    if rotary:
        draft.put("model", "rotary_base", base, settings.origin("rotary_base"))


_OF_EXPERTS: Final = (
    *("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
    *("moe_router_num_groups", "moe_router_group_topk"),
    *("expert_interval", "moe_router_enable_expert_bias", "moe_expert_capacity_factor", "moe_shared_expert_overlap"),
    *("moe_token_dispatcher_type", "moe_pad_expert_input_to_capacity", "moe_latent_size", "moe_extended_tp"),
)
"""Settings that a model without experts does not look at."""


def _experts(settings: Settings, draft: Draft) -> None:
    count = settings.take("num_experts", _num_experts)
    if count is None and settings.has("num_experts"):
        draft.unreadable.append("model.experts")
    of_deepspeed = settings.flag("deepspeed")
    if not count or count == 1:  # Megatron-DeepSpeed writes 1 for a dense model
        settings.ignore(*_OF_EXPERTS)
        return
    experts = {
        "num_experts": count,
        "per_token": settings.take("moe_router_topk", as_count, default=1 if of_deepspeed else 2),
        "ffn_hidden": settings.take("moe_ffn_hidden_size", as_count) or draft.value("model", "ffn_hidden"),
        "shared_ffn_hidden": settings.take("moe_shared_expert_intermediate_size", as_count) or 0,
        "num_dense_layers": settings.take("moe_layer_freq", num_dense_layers, default=0),
        "router_bias": int(settings.flag("moe_router_enable_expert_bias")),
    }
    groups = {"num_groups": "moe_router_num_groups", "group_topk": "moe_router_group_topk"}
    experts |= {ours: count for ours, theirs in groups.items() if (count := settings.take(theirs, as_count, 1)) > 1}
    if of_deepspeed and (every := settings.take("expert_interval", as_count, default=2)) > 1:
        origin = settings.origin("expert_interval", "num_experts")
        settings.shapes["expert_interval"] = f"{origin}: Megatron-DeepSpeed has experts in one of {every} layers"
    draft.put("model", "experts", experts, settings.origin("num_experts"))


def _num_experts(value: Any) -> int:
    """The number of experts of all layers; ValueError where layers have different numbers."""
    counts = {as_count(count) for count in (value if isinstance(value, list) else [value])}
    if len(counts) > 1:
        raise ValueError(value)
    return counts.pop()


def num_dense_layers(text: Any) -> int:
    """First layers without experts in a ``--moe-layer-freq`` such as ``([0]*3+[1]*58)``; others are refused."""
    if str(text).strip() in ("1", "None"):
        return 0
    pattern = as_layers(text)
    count = next((place for place, kind in enumerate(pattern) if int(kind)), 0)
    if not pattern or not all(int(kind) for kind in pattern[count:]):
        raise ValueError(text)
    return count


def _windows(settings: Settings, draft: Draft) -> None:
    """Megatron-Core counts the tokens before a token; -1 is no window, 1 a whole layer after none with one."""
    before = settings.take("window_size", _num_before)
    pattern = settings.take("window_attn_skip_freq", _window_pattern)
    if before is not None and before >= 0 and pattern != 1:
        draft.put("model", "sliding_window", before + 1, settings.origin("window_size"))
        draft.put("model", "window_attn_skip_freq", pattern, settings.origin("window_attn_skip_freq"))


def _window_pattern(value: Any) -> int | list[int]:
    return int(value) if str(value).strip().isdigit() else as_layers(value)


def _num_before(value: Any) -> int:
    """The left one of ``(127, 0)``, a list, or a number alone."""
    return int(value[0] if isinstance(value, list | tuple) else str(value).strip("([ ").partition(",")[0])


def _latent_attention(settings: Settings, draft: Draft) -> None:
    names = {
        "query_rank": ("q_lora_rank", 0),
        "kv_rank": ("kv_lora_rank", 32),
        "nope_dim": ("qk_head_dim", 128),
        "rope_dim": ("qk_pos_emb_head_dim", 64),
        "value_dim": ("v_head_dim", 128),
    }
    if not settings.flag("multi_latent_attention"):
        settings.ignore(*(name for name, _ in names.values()))
        return
    latent = {key: settings.take(name, as_count, default) for key, (name, default) in names.items()}
    draft.put("model", "latent_attention", latent, settings.origin("multi_latent_attention"))
    draft.put("model", "head_dim", latent["nope_dim"] + latent["rope_dim"], "qk-head-dim + qk-pos-emb-head-dim")
