import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.hugging_face_golden import CONFIGS, GOLDEN, TOKENS, weight
from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.core.spec.hugging_face import config_of, model_fields, read_model
from farpipe.core.spec.hugging_face import read_config as read_config_alone
from farpipe.engine.stages import hugging_face_weights
from farpipe.engine.stages.decoder_weights import expected_names, save_model, their_name
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, build
from farpipe.engine.stages.hugging_face_weights import load, read_config, save
from farpipe.engine.stages.slices import StageSlice, slices
from job_files import changed
from small_models import GPT, even_partition

EXPECTED = json.loads(GOLDEN.read_text())["models"]
STRETCHED = "llama 3.2, stretched, tied"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def shapes(config):
    """Hugging Face's names and shapes, written down once more, from their config."""
    hidden, inner, heads = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head = config.get("head_dim", hidden // heads)
    query, key = head * heads, head * config["num_key_value_heads"]
    linear = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in linear.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
            if config.get("attention_bias") or (config["model_type"] == "qwen2" and name in QKV):
                found[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def write_model(folder, config, *, num_files=1, dtype=torch.float32):
    """A folder as Hugging Face's libraries write it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: weight(name, shape).to(dtype) for name, shape in shapes(config).items()}
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    files = [f"model-{number + 1:05d}-of-{num_files:05d}.safetensors" for number in range(num_files)]
    weight_map = {name: files[place % num_files] for place, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name, owner in weight_map.items() if owner == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def load_stage(folder, part):
    module = HuggingFaceSlice(build(read_config(folder), torch.float32), part)
    load(module, folder)
    return module


def load_stages(folder, num_stages=1):
    return [load_stage(folder, part) for part in slices(even_partition(read_model(folder), num_stages))]


def run(stages):
    x = torch.tensor(TOKENS)
    with torch.no_grad():
        for stage in stages:
            x = stage(x)
    return x


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name, tmp_path):
    write_model(tmp_path / "m", CONFIGS[name])
    logits = run(load_stages(tmp_path / "m"))
    expected = torch.tensor(EXPECTED[name]["last_logits"])
    assert torch.allclose(logits[:, -2:].flatten(0, 1), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert float(logits.square().mean()) == pytest.approx(EXPECTED[name]["mean_square"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_stages_that_are_loaded_from_several_files_make_the_same_logits(name, tmp_path):
    write_model(tmp_path / "one", CONFIGS[name])
    write_model(tmp_path / "several", CONFIGS[name], num_files=3)
    assert torch.equal(run(load_stages(tmp_path / "one")), run(load_stages(tmp_path / "several", num_stages=2)))


@pytest.mark.parametrize("name", CONFIGS)
def test_our_names_are_transformers_names(name):
    model = parse_model(CONFIGS[name])
    theirs = {their_name(ours, model) for ours in expected_names(model)}
    unsaved = {"lm_head.weight"} if CONFIGS[name]["tie_word_embeddings"] else set()
    assert theirs == set(EXPECTED[name]["names"]) - unsaved


def parse_model(config):
    from farpipe.core.spec import Model

    return Model.model_validate(model_fields(config))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_loaded_is_exported_bit_for_bit(name, max_shard_bytes, dtype, tmp_path):
    tensors = write_model(tmp_path / "in", CONFIGS[name], num_files=2, dtype=getattr(torch, dtype))
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    parameters = {key: p for stage in load_stages(tmp_path / "in", 2) for key, p in stage.named_parameters()}
    save(parameters, read_model(tmp_path / "in"), tmp_path / "out", dtype=dtype, max_shard_bytes=max_shard_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes == 20_000)
    assert all(file.stat().st_size < 20_000 + 4_000 for file in files) or max_shard_bytes > 20_000
    found = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensors[key]) and found[key].dtype == tensors[key].dtype for key in tensors)
    assert read_model(tmp_path / "out").num_params == read_model(tmp_path / "in").num_params
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert torch.equal(run(load_stages(tmp_path / "out")), run(load_stages(tmp_path / "in")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"], "nothing temporary is left"


def test_a_stage_reads_its_own_tensors_only(tmp_path, monkeypatch):
    write_model(tmp_path / "m", CONFIGS["llama 3, grouped"], num_files=3)
    read = []
    whole = hugging_face_weights.convert_and_load_state_dict_in_model

    def listening(model, slices, settings):
        read.extend(slices)
        return whole(model, slices, settings)

    monkeypatch.setattr(hugging_face_weights, "convert_and_load_state_dict_in_model", listening)
    load_stage(tmp_path / "m", StageSlice(1, 2, False, False))
    assert len(read) == 9
    assert all(name.startswith("model.layers.1.") for name in read)


def test_files_of_another_class_are_refused(tmp_path):
    """Those of Qwen3 beside a config of Llama would train a model without the norms of queries and keys."""
    path = tmp_path / "m" / "model.safetensors"
    write_model(tmp_path / "m", CONFIGS["llama 3, grouped"])
    tensors = load_file(path) | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(tensors, path, metadata={"format": "pt"})
    load_stage(tmp_path / "m", StageSlice(1, 2, False, False))
    save_file(tensors | {"model.layers.1.self_attn.q_norm.weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"LlamaForCausalLM has no model\.layers\.1\.self_attn\.q_norm\.weight"):
        load_stage(tmp_path / "m", StageSlice(1, 2, False, False))
    load_stage(tmp_path / "m", StageSlice(0, 1, True, False))


def test_pages_of_files_leave_memory_with_what_was_read_of_them(tmp_path, monkeypatch):
    write_model(tmp_path / "m", CONFIGS["llama 3, grouped"])
    whole = hugging_face_weights.convert_and_load_state_dict_in_model
    mapped, held = [], []

    def listening(model, slices, settings):
        for tensor in slices.values():
            held.append(tensor[...])
            assert held[-1].shape == torch.Size(tensor.get_shape())
            mapped.append(str(tmp_path) in Path("/proc/self/maps").read_text())
        return whole(model, slices, settings)

    monkeypatch.setattr(hugging_face_weights, "convert_and_load_state_dict_in_model", listening)
    load_stage(tmp_path / "m", StageSlice(1, 2, False, False))
    assert mapped == [False] * 9


@pytest.mark.parametrize("written", ["other", "shorter", "longer", "nothing"])
def test_what_is_written_over_a_file_later_does_not_reach_the_model(written, tmp_path):
    """As `cp` writes: into the same file. On a map of it that would change weights, or end the process."""
    tensors = write_model(tmp_path / "m", CONFIGS["llama 3, grouped"])
    path, size = tmp_path / "m" / "model.safetensors", (tmp_path / "m" / "model.safetensors").stat().st_size
    module = load_stage(tmp_path / "m", StageSlice(0, 2, True, False))
    data = {"other": b"\1" * size, "shorter": b"\1" * 99, "longer": b"\1" * size * 2, "nothing": b""}[written]
    with path.open("wb") as file:
        file.write(data)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in module.named_parameters())


def test_a_file_that_is_written_to_while_it_is_read_is_refused(tmp_path, monkeypatch):
    write_model(tmp_path / "m", CONFIGS["llama 3, grouped"])
    path, whole = tmp_path / "m" / "model.safetensors", hugging_face_weights.convert_and_load_state_dict_in_model

    def overtaken(*arguments):
        found = whole(*arguments)
        path.write_bytes(path.read_bytes()[:-4] + b"\1\1\1\1")
        return found

    monkeypatch.setattr(hugging_face_weights, "convert_and_load_state_dict_in_model", overtaken)
    with pytest.raises(InputError, match=r"model\.safetensors: was written to while it was read; start again"):
        load_stage(tmp_path / "m", StageSlice(1, 2, False, False))


def test_files_of_other_stages_need_not_be_there(tmp_path):
    write_model(tmp_path / "m", CONFIGS["llama 3, grouped"], num_files=30)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())["weight_map"]
    for file in {file for name, file in index.items() if not name.startswith("model.layers.1.")}:
        (tmp_path / "m" / file).unlink()
    load_stage(tmp_path / "m", StageSlice(1, 2, False, False))
    with pytest.raises(
        InputError, match=r"model-\d+-of-00030\.safetensors: can't be read: No such file.*; the stage of layers 0 to 0"
    ):
        load_stage(tmp_path / "m", StageSlice(0, 1, True, False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "bert"},
            "config.json: model_type: 'bert' is not supported; farpipe reads llama, mistral, qwen2, .* more types",
        ),
        ({"sliding_window": 4096}, "sliding_window: 4096 may say a shape that is not known of a llama"),
        ({"layer_types": ["mamba"]}, r"layer_types\[0\]: 'mamba' is not supported, only 'full_attention' and 'slid"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling: original_max_position_embeddings: missing",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": 1.0}}, r"rope_scaling: mscale: 1\.0 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters: partial_rotary_factor: 0.5 is not"),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor: 0.5 is not"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters: low_freq_factor: missing"),
        ({"attention_bias": True}, "attention_bias and mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported, only 'silu'"),
        ({"hidden_size": None}, "config.json: hidden"),
        ({"num_attention_heads": 5}, "head"),
    ],
)
def test_what_is_not_supported_is_refused(changes, message, tmp_path):
    """By farpipe's own decoder, which learns of a model by its config alone."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama 2"] | changes))
    with pytest.raises(InputError, match=message):
        read_config_alone(tmp_path / "config.json")


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 8, "model_type": "mistral"}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_what_transformers_computes_needs_no_description_of_ours(changes, tmp_path):
    config = CONFIGS["llama 2"] | changes
    write_model(tmp_path / "m", CONFIGS["llama 2"])
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path / "m")
    assert (model.num_layers, model.hidden, model.hugging_face) == (3, 32, str(tmp_path / "m"))
    assert read_config(tmp_path / "m").model_type == config["model_type"]


def test_narrow_weights_are_planned_but_not_read(tmp_path):
    write_model(tmp_path / "m", CONFIGS["llama 2"])
    narrow = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIGS["llama 2"] | narrow))
    assert read_model(tmp_path / "m").num_layers == 3
    with pytest.raises(InputError, match=r"quantization_config: weights in fp8 can be planned, but not read"):
        read_config(tmp_path / "m")


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": None,
}  # fmt: skip


@pytest.mark.parametrize(("config", "num_params"), [(GPT2, 124_439_808), (GEMMA, 999_885_952)], ids=["gpt2", "gemma3"])
def test_other_models_have_about_their_published_number_of_parameters(config, num_params, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path)
    assert model.num_params == pytest.approx(num_params, rel=1e-3)
    assert model.tied_embeddings, "which their configs need not say"


def test_a_mistral_has_to_say_that_it_has_no_window():
    without = {key: value for key, value in CONFIGS["mistral"].items() if key != "sliding_window"}
    with pytest.raises(InputError, match="sliding_window: missing"):
        model_fields(without)


QWEN_COMMON = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_mrope": False,
    "use_sliding_window": False,
}


@pytest.mark.parametrize(
    ("shape", "is_tied", "window", "num_params"),
    [
        ((24, 896, 14, 2, 4864, 151936), True, 32768, 494_032_768),
        ((28, 3584, 28, 4, 18944, 152064), False, 131072, 7_615_616_512),
    ],
    ids=["0.5B", "7B"],
)
def test_configs_as_qwen_2_5_has_them_have_its_number_of_parameters(shape, is_tied, window, num_params):
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    config = QWEN_COMMON | dict(zip((*keys, "vocab_size"), shape, strict=True))
    config |= {"tie_word_embeddings": is_tied, "sliding_window": window, "max_window_layers": shape[0]}
    assert parse_model(config).num_params == num_params


WINDOW = {"use_sliding_window": True, "sliding_window": 8}
KINDS = ["full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"sliding_window": 8}, 0),
        ({"sliding_window": 8, "use_sliding_window": False}, 0),
        (WINDOW | {"max_window_layers": 2}, (0, 0, 1)),
        (WINDOW | {"max_window_layers": 0}, None),
        (WINDOW | {"max_window_layers": 3}, 0),
        (WINDOW, 0),
        (WINDOW | {"layer_types": KINDS}, (0, 0, 1)),
        (WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, 2),
        (WINDOW | {"layer_types": ["full_attention"] * 3, "max_window_layers": 2}, 0),
        (WINDOW | {"layer_types": [*KINDS, "full_attention"]}, (0, 0, 1)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}, 0),
    ],
)
def test_a_qwen_has_windows_in_the_layers_that_use_them(changes, pattern):
    """Three layers; where nothing else is said, the 28th is the first that uses one; 0: none has."""
    config = {key: value for key, value in CONFIGS["qwen 2"].items() if not (key in WINDOW or "window" in key)}
    model = parse_model(config | changes)
    assert model.qkv_bias
    assert (model.sliding_window, model.window_attn_skip_freq) == ((None, None) if pattern == 0 else (8, pattern))


GEMMA_KINDS = [*(["sliding_attention"] * 5 + ["full_attention"]) * 4, "full_attention", "sliding_attention"]
GEMMA_PATTERN = tuple(int(kind == "sliding_attention") for kind in GEMMA_KINDS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": KINDS[1:]}, "window_attn_skip_freq: 2 entries for num_layers 3"),
        ({"layer_types": []}, r"window_attn_skip_freq: .*found \[\]"),
        ({"num_hidden_layers": "3"}, "num_layers: input should be a valid integer"),
        ({"max_window_layers": "x"}, "window_attn_skip_freq: .*found 'x'"),
        ({"sliding_window": "x"}, "sliding_window: input should be a valid integer"),
    ],
)
def test_a_window_of_layers_that_cannot_be_is_refused(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen 2"] | WINDOW | changes))
    with pytest.raises(InputError, match=message):
        read_config_alone(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "every", "share"),
    [
        ({"sliding_window": 512}, 6, 22 / 26),
        ({"sliding_window": 512, "sliding_window_pattern": 2}, 2, 1 / 2),
        ({"sliding_window": 512, "layer_types": GEMMA_KINDS}, GEMMA_PATTERN, 21 / 26),
        ({}, None, 0),
    ],
)
def test_a_gemma_has_its_local_layers(changes, every, share, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA | changes))
    model = read_model(tmp_path)
    assert (model.window_attn_skip_freq, model.windowed_share) == (every, pytest.approx(share))


def test_a_model_with_windows_is_no_llama():
    model = parse_model(CONFIGS["mistral"] | {"sliding_window": 4096})
    assert (model.sliding_window, model.window_attn_skip_freq) == (4096, None)
    with pytest.raises(InputError, match=r"model\.sliding_window: 4096 can't be exported: a Llama has None"):
        config_of(model, "float32")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match="there is no such folder"):
        read_model(tmp_path / "absent")
    write_model(tmp_path / "m", CONFIGS["llama 2"], num_files=2)
    part = StageSlice(0, 1, True, False)
    index = tmp_path / "m" / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace("model.embed_tokens.weight", "model.embed_token.weight"))
    with pytest.raises(InputError, match=r"no tensor model\.embed_tokens\.weight; does config\.json belong"):
        load_stage(tmp_path / "m", part)
    index.write_text(text.replace("model-00001", "../model-00001"))
    with pytest.raises(InputError, match="expected a table from tensors to files of this folder"):
        load_stage(tmp_path / "m", part)
    index.unlink()
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        load_stage(tmp_path / "m", part)


def test_damaged_and_unfitting_files_are_told(tmp_path):
    write_model(tmp_path / "m", CONFIGS["llama 2"])
    part = StageSlice(0, 1, True, False)
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIGS["llama 2"] | {"vocab_size": 65}))
    with pytest.raises(InputError, match=r"embed_tokens\.weight is \[64, 32\], but the model needs \[65, 32\]"):
        load_stage(tmp_path / "m", part)
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIGS["llama 2"]))
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"model\.safetensors: not a whole safetensors file"):
        load_stage(tmp_path / "m", part)


def test_what_can_not_be_exported_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"model\.gated_mlp: False can't be exported"):
        config_of(GPT, "float32")
    write_model(tmp_path / "m", CONFIGS["llama 2"])
    model = read_model(tmp_path / "m")
    with pytest.raises(InputError, match=r"no parameter 'embedding.weight' to export \(30 of 30 are missing\)"):
        save_model({}, model, tmp_path / "out")
    parameters = dict(load_stages(tmp_path / "m")[0].named_parameters())
    with pytest.raises(InputError, match="has something in it"):
        save(parameters, model, tmp_path / "m")


def test_a_job_takes_the_shape_from_the_config(tmp_path):
    write_model(tmp_path / "m", CONFIGS[STRETCHED] | {"vocab_size": 256})
    text = changed(('preset = "llama-3-8b"', f'hugging_face = "{tmp_path / "m"}"'))
    model = parse_job(text).model
    assert (model.num_layers, model.rotary_base, model.tied_embeddings) == (3, 500.0, True)
    assert model.rotary_scaling.original_length == 16
    assert model.hugging_face == str(tmp_path / "m")
    with pytest.raises(InputError, match=r"model\.hugging_face: .*absent: there is no such folder"):
        parse_job(text.replace(str(tmp_path / "m"), str(tmp_path / "absent")))
    with pytest.raises(InputError, match="either a preset or hugging_face"):
        parse_job(text.replace("hugging_face", 'preset = "tiny"\nhugging_face'))
