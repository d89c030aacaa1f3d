"""Copies of a model that differ between sites, or from what a checkpoint was trained with."""

import json
import shutil
import sys
from itertools import count

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.stages.test_training import hf_run, write_model
from farpipe.core.errors import InputError
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages import own_module
from farpipe.engine.stages.hugging_face_weights import config_facts, sampled_digests
from farpipe.engine.train import train_rank
from in_process import run_ranks
from small_models import TIED
from trainings import folder, losses, make_run, metrics, train

NUMBERS = count()


def set_in_config(**changes):
    def change(model):
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def add_to(name, part=1e-3):
    """Another value in a part of a tensor."""

    def change(model):
        tensors = load_file(model / "model.safetensors")
        tensors[name] = tensors[name] + part
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return change


ROPE = {"rope_theta": 500000.0, "rope_type": "default"}
DIFFERENT = {
    "activation": (set_in_config(hidden_act="gelu"), r'hidden_act in config.json is "silu" at .* and "gelu" at '),
    "a key of a table": (set_in_config(rope_parameters=ROPE), r"rope_parameters.rope_theta .* 10000 at .* 500000 at "),
    "a norm": (add_to("model.layers.3.input_layernorm.weight"), r"weights of model.layers.3 differs between "),
    "a head": (add_to("lm_head.weight"), r"weights of lm_head.weight differs between "),
}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", "qwen3")


@pytest.mark.parametrize("different", DIFFERENT)
def test_sites_with_different_copies_of_a_model_stop_before_the_first_step(
    different, model, text_file, tmp_path, monkeypatch
):
    change, words = DIFFERENT[different]
    change(shutil.copytree(model, tmp_path / "copy") and tmp_path / "copy")
    runs = [hf_run(place, text_file) for place in (model, tmp_path / "copy")]
    monkeypatch.setattr(RunSpec, "to_json", lambda run: "")  # they are told apart by nothing else
    with pytest.raises(InputError, match=rf"{words}.*\(rank 1\).*; copy the same model to every site"):
        run_ranks(2, lambda peers: train_rank(runs[peers.rank], peers, tmp_path))


def test_what_computes_nothing_and_other_files_of_the_same_tensors_make_no_difference(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    set_in_config(architectures=["Other"], dtype="bfloat16", transformers_version="5.0", use_cache=False)(
        tmp_path / "copy"
    )
    tensors = load_file(model / "model.safetensors")
    halves = [[*tensors][:9], [*tensors][9:]]
    for number, names in enumerate(halves):
        save_file({name: tensors[name] for name in names}, tmp_path / "copy" / f"{number}.safetensors")
    index = {name: f"{number}.safetensors" for number, names in enumerate(halves) for name in names}
    (tmp_path / "copy" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "copy" / "model.safetensors").unlink()
    assert config_facts(model) == config_facts(tmp_path / "copy")
    whole = sampled_digests(model)
    assert sampled_digests(tmp_path / "copy") == whole
    (tmp_path / "copy" / "1.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    part = sampled_digests(tmp_path / "copy")
    assert part
    assert part.items() < whole.items(), "what this site lacks is not compared"


@pytest.mark.parametrize("size", [10, 5000, 300_000])
def test_a_digest_has_some_of_every_tensor(size, tmp_path):
    tensors = {"model.a": torch.zeros(size), "model.b": torch.arange(size)}
    save_file(tensors, tmp_path / "model.safetensors")
    before = sampled_digests(tmp_path)
    save_file(tensors | {"model.b": torch.arange(size) + 1}, tmp_path / "model.safetensors")
    after = sampled_digests(tmp_path)
    assert [name for name in before if before[name] != after[name]] == ["model.b"]


@pytest.mark.parametrize("different", ["activation", "a key of a table"])
def test_a_training_does_not_go_on_with_another_config(different, model, text_file, tmp_path):
    change, _ = DIFFERENT[different]
    run = hf_run(model, text_file, num_steps=2)
    train(run, tmp_path / "run")
    change(model)
    again, key = {"num_steps": 4, "resume": str(tmp_path / "run")}, r"(hidden_act|rope_theta) in config.json is"
    for place, changes in (("other", again), ("run", {"num_steps": 4})):
        (tmp_path / place / "summary.json").unlink(missing_ok=True)
        with pytest.raises(InputError, match=rf"no checkpoint can be used:\n.*{key} .* at site site0, and was "):
            train(run.model_copy(update=changes), tmp_path / place)


def test_weights_that_changed_after_a_checkpoint_don_t_matter(model, text_file, tmp_path):
    run = hf_run(model, text_file, num_steps=2)
    more = run.model_copy(update={"num_steps": 4, "resume": str(tmp_path / "run")})
    train(run, tmp_path / "run")
    train(more, tmp_path / "one")
    add_to("lm_head.weight")(model)
    train(more, tmp_path / "other")
    assert losses(tmp_path / "one") == losses(tmp_path / "other")


def test_tensors_that_no_checkpoint_has_must_stay(text_file, tmp_path):
    model = write_model(tmp_path / "model", "deepseek_v3")
    run = hf_run(model, text_file, num_steps=1)
    train(run, tmp_path / "run")
    facts = Manifest.load(folder(tmp_path / "run", 1)).facts
    bias = next(name for name in load_file(model / "model.safetensors") if name.endswith("e_score_correction_bias"))
    assert bias in facts.buffers, "ranks put theirs together"
    add_to(bias, 0.5)(model)
    with pytest.raises(InputError, match=f"{bias}, which no checkpoint has, is no longer the same at site site"):
        train(run.model_copy(update={"num_steps": 2, "resume": str(tmp_path / "run")}), tmp_path / "more")


def test_a_checkpoint_of_an_earlier_version_or_another_transformers_is_read(model, text_file, tmp_path):
    run = hf_run(model, text_file, num_steps=1)
    train(run, tmp_path / "run")
    place = folder(tmp_path / "run", 1)
    written = Manifest.load(place)
    other = written.facts.model_copy(
        update={"transformers": "4.9", "config": {**written.facts.config, "once": "1"} | {"hidden_act": '"silu"'}}
    )
    for number, facts in enumerate((type(other)(), other)):
        written.model_copy(update={"facts": facts}).save(place)
        more = run.model_copy(update={"num_steps": 2, "resume": str(tmp_path / "run")})
        train(more, tmp_path / f"more-{number}")


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """The folder of a module that stages come from, with one beside it and a package."""
    name = f"mine_{next(NUMBERS)}"
    place = tmp_path / "code"
    (place / f"{name}_package").mkdir(parents=True)
    source = "from engine.stages.own_modules import build\n"
    (place / f"{name}_beside.py").write_text(source)
    (place / f"{name}.py").write_text(f"from {name}_beside import build\n")
    (place / f"{name}_package" / "__init__.py").write_text("from .inner import build\n")
    (place / f"{name}_package" / "inner.py").write_text(source)
    monkeypatch.syspath_prepend(place)
    yield place, name
    for module in [one for one in sys.modules if one.startswith(name)]:
        del sys.modules[module]


def test_a_module_of_one_s_own_is_all_its_files(own_code):
    place, name = own_code
    alone, package = f"{name}:build", f"{name}_package:build"
    before = [own_module.digests_of_files(each) for each in (alone, package)]
    assert [{*found} for found in before] == [{name, f"{name}_beside"}, {f"{name}_package", f"{name}_package.inner"}]
    for file in (f"{name}_beside.py", f"{name}_package/inner.py"):
        (place / file).write_text("build = None\n")
    after = [own_module.digests_of_files(each) for each in (alone, package)]
    changed = [[one for one in old if old[one] != new[one]] for old, new in zip(before, after, strict=True)]
    assert changed == [[f"{name}_beside"], [f"{name}_package.inner"]]
    assert {*own_module.digests_of_files("safetensors:x")} <= {
        one for one in sys.modules if one.startswith("safetensors")
    }


def own_run(name, text_file, **options):
    model = TIED.model_copy(update={"module": f"{name}:build", "tied_embeddings": False, "hidden": 16})
    return make_run(text_file, model=model, **options)


def test_code_of_one_s_own_is_equal_at_all_sites_and_a_change_is_reported(own_code, text_file, tmp_path, monkeypatch):
    place, name = own_code
    run = own_run(name, text_file, num_steps=2)
    train(run, tmp_path / "run")
    (place / f"{name}_beside.py").write_text("from engine.stages.own_modules import build  # mended\n")
    more = run.model_copy(update={"num_steps": 4, "resume": str(tmp_path / "run")})
    train(more, tmp_path / "more")
    words = f"model.module: {name}_beside is not what the checkpoint was trained with"
    assert words in metrics(tmp_path / "more")[0]["warnings"]
    digests = iter("ab")
    monkeypatch.setattr(own_module, "digests_of_files", lambda name: {name: next(digests)})
    with pytest.raises(InputError, match=rf"model.module: module {name}:build differs between site site0 \(rank 0\)"):
        train(run, tmp_path / "third")
