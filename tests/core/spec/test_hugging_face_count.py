"""Parameters counted by files of weights, an index or transformers' class, and what is refused or guessed by them."""

import json
import struct

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import hugging_face_count, parse_job
from farpipe.core.spec.hugging_face import GUESS_HINT, read_config, read_model
from farpipe.core.spec.hugging_face_count import INDEX_NAME, count_parameters
from job_files import changed

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
}  # fmt: skip
NUM_PARAMS = 106_816
UNKNOWN = CONFIG | {"model_type": "nobodys"}


def tensors(num_layers=2):
    """Names and shapes of a Llama's weights."""
    found = {"model.embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64), "model.norm.weight": (64,)}
    for layer in range(num_layers):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
        found |= {f"model.layers.{layer}.{name}layernorm.weight": (64,) for name in ("input_", "post_attention_")}
    return {name: ("BF16", shape) for name, shape in found.items()}


def write(folder, config=CONFIG, header=None, index=None):
    """A folder with a config, and with a file of weights that has nothing but its header, or an index alone."""
    (folder / "config.json").write_text(json.dumps(config))
    if header is not None:
        table = {
            name: {"dtype": kind, "shape": list(shape), "data_offsets": [0, 0]}
            for name, (kind, shape) in header.items()
        }
        body = json.dumps(table | {"__metadata__": {"format": "pt"}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(body)) + body)
    if index is not None:
        names = dict.fromkeys(tensors(), "model-00001-of-00002.safetensors")
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": index, "weight_map": names}))
    return folder


OF_TRANSFORMERS = hugging_face_count._of_transformers


@pytest.fixture(autouse=True)
def _no_class(monkeypatch):
    """Weights and index count here, unless a test says otherwise."""
    monkeypatch.setattr("farpipe.core.spec.hugging_face_count._of_transformers", lambda config: None)


def packed(kind, number):
    """The weights of layers in narrow numbers, with what comes with them; the rest stays as it is."""
    found = {}
    for name, (dtype, shape) in tensors().items():
        if ".mlp." not in name and ".self_attn." not in name:
            found[name] = dtype, shape
            continue
        stem = name.removesuffix("weight")
        size = shape[0] * shape[1]
        found[f"{stem}{kind}"] = number[0], (size // number[1],)
        found |= {
            f"{stem}{extra}": ("F32", (size // 2,)) for extra in ("weight_scale_inv", "qzeros", "g_idx", "absmax")
        }
    return found


@pytest.mark.parametrize(
    ("quantization", "header"),
    [
        (None, tensors()),
        (None, tensors() | {"model.layers.1.self_attn.rotary_emb.inv_freq": ("F32", (5000,))}),
        (None, tensors(num_layers=3)),  # a module that predicts further tokens
        (None, tensors() | {"mtp.layers.0.mlp.up_proj.weight": ("BF16", (999, 64))}),
        ({"quant_method": "fp8"}, packed("weight", ("F8_E4M3", 1))),
        ({"quant_method": "gptq", "bits": 4}, packed("qweight", ("I32", 8))),
        ({"quant_method": "awq", "bits": 8}, packed("qweight", ("I32", 4))),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, packed("weight", ("U8", 2))),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, packed("weight", ("I8", 1))),
        ({"quant_method": "mxfp4"}, packed("weight_blocks", ("U8", 2))),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
            packed("weight_packed", ("I32", 8)),
        ),
    ],
    ids=lambda value: (value or {}).get("quant_method", "") if isinstance(value, dict) else "",
)
def test_weights_of_any_width_are_counted_by_their_headers(quantization, header, tmp_path):
    config = CONFIG | ({"quantization_config": quantization} if quantization else {})
    model = read_model(write(tmp_path, config, header))
    assert model.num_params == NUM_PARAMS
    assert count_parameters(config, tmp_path / "config.json", model) == (NUM_PARAMS, "its weights have")


def test_a_tied_head_in_the_files_is_the_embedding_once_more(tmp_path):
    assert read_model(write(tmp_path, CONFIG | {"tie_word_embeddings": True}, tensors())).tied_embeddings


WIDE = tensors() | {"model.layers.0.mlp.more.weight": ("BF16", (64, 128))}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"header": WIDE}, "read as a model of 106,816 parameters, but its weights have 115,008: a variant of llama"),
        ({"index": {"total_size": 2 * 120_000}}, "106,816 parameters, but its index says 120,000"),
        ({"header": {"a": ("BF16", (1 << 20,))}}, "but its weights have 1.05 M"),
    ],
    ids=["weights", "index", "others"],
)
def test_another_number_of_parameters_is_refused_with_both(written, message, tmp_path):
    write(tmp_path, **written)
    for read in (lambda: read_model(tmp_path), lambda: read_config(tmp_path / "config.json")):
        with pytest.raises(InputError, match=message):
            read()


@pytest.mark.parametrize("index", [{"total_size": 2 * NUM_PARAMS}, {"total_size": 0}, {}])
def test_an_index_that_says_the_same_or_nothing_is_taken(index, tmp_path):
    assert read_model(write(tmp_path, index=index)).num_params == NUM_PARAMS


def test_a_damaged_file_of_weights_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(InputError, match=r"model\.safetensors: not a whole safetensors file"):
        read_model(tmp_path)


def test_a_pointer_of_git_in_the_place_of_weights_counts_nothing(tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 5\n")
    assert read_model(tmp_path).num_params == NUM_PARAMS


def test_transformers_class_counts_where_there_are_no_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("farpipe.core.spec.hugging_face_count._of_transformers", lambda config: 2 * NUM_PARAMS)
    with pytest.raises(InputError, match="106,816 parameters, but transformers makes one of 213,632"):
        read_model(write(tmp_path))


def job_text(folder, *more):
    lines = "\n".join((f'hugging_face = "{folder}"', *more))
    return changed(('preset = "llama-3-8b"', lines))


def test_a_model_that_is_not_known_needs_an_explicit_guess(tmp_path):
    text = job_text(write(tmp_path, UNKNOWN))
    with pytest.raises(InputError, match=r"model_type: 'nobodys' is not supported(.|\n)*guess = true"):
        parse_job(text)
    model = parse_job(job_text(tmp_path, "guess = true")).model
    assert (model.guess, model.name, model.num_params) == (True, "nobodys (guessed)", NUM_PARAMS)
    assert model.size_data == {"num_parameters": NUM_PARAMS, "model_guessed": True, "counted_parameters": None}
    named = parse_job(job_text(tmp_path, "guess = true", 'name = "mine"'))
    assert named.model.name == "mine (guessed)"
    assert parse_job(named.model_copy(update={"text": ""}).to_toml()).model == named.model


def test_a_guess_says_what_was_counted(tmp_path):
    model = read_model(write(tmp_path, UNKNOWN, WIDE), guess=True)
    assert model.counted_params == 115_008
    assert model.size_text == "106,816 parameters, but 115,008 counted"
    assert "a guess: 106,816 parameters, but 115,008 counted" in model.guess_note


def test_a_guess_without_need_is_refused(tmp_path):
    with pytest.raises(InputError, match="nothing has to be guessed of this llama"):
        parse_job(job_text(write(tmp_path), "guess = true"))
    with pytest.raises(InputError, match=r"model\.guess: only a model of hugging_face is guessed"):
        parse_job(changed(('preset = "llama-3-8b"', 'preset = "llama-3-8b"\nguess = true')))


def test_a_variant_that_is_not_known_is_told_how_to_be_guessed(tmp_path):
    with pytest.raises(InputError) as error:
        read_model(write(tmp_path, CONFIG | {"attn_layer_period": 8}))
    assert GUESS_HINT in str(error.value)


@pytest.mark.parametrize("quantization", [{"bits": 4}, {"quant_method": "aqlm"}, "narrow"])
def test_weights_of_a_format_that_is_not_known_count_nothing(quantization, tmp_path):
    config = CONFIG | {"quantization_config": quantization}
    assert read_model(write(tmp_path, config, {"a": ("I32", (7,))})).num_params == NUM_PARAMS


@pytest.mark.slow
def test_transformers_class_is_asked_once_for_each_config(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = json.dumps(CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    assert OF_TRANSFORMERS.__wrapped__(config) == NUM_PARAMS
    monkeypatch.setattr(hugging_face_count, "_COUNTING", ("false",))
    assert OF_TRANSFORMERS.__wrapped__(config) == NUM_PARAMS
    assert OF_TRANSFORMERS.__wrapped__(json.dumps(UNKNOWN)) is None
