"""Profiles of Sailor become ours."""

import json
import os
from pathlib import Path

import pytest

from cost_jobs import gpt, layout, site, training
from farpipe.cost import import_sailor, stage_cost
from farpipe.errors import InputError

DATA = os.environ.get("FARPIPE_DATA")
LAYERS = {"0": [1, 0, 5], **{str(k): [2, 4, 6] for k in range(1, 5)}, "5": [3, 8, 7]}


def written(tmp_path, layers=LAYERS, tensor="1"):
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps({"GPT": {"A100-40": {"2": {tensor: layers}, "4": {tensor: layers}}}}))
    return path


def read(path, model="GPT", device="A100-40", **how):
    return import_sailor(path, model, device, gpt(**how), training(microbatch_size=2), "a100-80gb")


def test_layers_embedding_and_head_become_parts(tmp_path):
    profile = read(written(tmp_path))
    assert profile.microbatch_size == 2
    assert (profile.layer.forward_s, profile.layer.input_grad_s + profile.layer.weight_grad_s) == (2, 4)
    assert (profile.embedding.forward_s, profile.head.forward_s) == (1, 3)
    assert profile.optimizer_s_per_param == pytest.approx(6 / gpt().num_layer_params)
    cost = stage_cost(gpt(), training(), layout(), site(), 4, embedding=True, head=True, profile=profile)
    assert cost.forward_s == pytest.approx(1 + 4 * 2 + 3)


def test_a_norm_before_the_head_counts_to_it(tmp_path):
    profile = read(written(tmp_path, LAYERS | {"6": [0.5, 1, 0]}))
    assert profile.head.forward_s == 3.5


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"model": "GTP"}, "there is no model 'GTP'; did you mean 'GPT'"),
        ({"device": "A100"}, "there is no device 'A100'; did you mean 'A100-40'"),
        ({"num_layers": 7}, "6 layers with embedding and head; the job's model has 7"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, how, message):
    with pytest.raises(InputError, match=message):
        read(written(tmp_path), **how)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": "2"}, "nothing was measured on one device"),
        ({"layers": LAYERS | {"2": [1, 2]}}, "three times for every layer"),
        ({"layers": LAYERS | {"2": [1, -2, 3]}}, "none negative"),
        ({"layers": LAYERS | {"x": [1, 2, 3]}}, "expected numbers"),
    ],
)
def test_a_damaged_table_is_an_input_error(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        read(written(tmp_path, **change))


@pytest.mark.skipif(not DATA, reason="FARPIPE_DATA is not set: Sailor's profiles are not here")
def test_a_published_profile_is_read():
    model = gpt(num_layers=24, hidden=1024, num_heads=16, vocab_size=50272)
    spec = training(sequence_length=2048, precision="fp32", microbatch_size=8)
    profile = import_sailor(Path(DATA or "") / "sailor" / "profiles_tmp.json", "OPT-350", "GH-96", model, spec, "gh200")
    assert profile.layer.forward_s == pytest.approx(7e-3, rel=0.05)
