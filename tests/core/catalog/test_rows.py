"""The catalogue: every row can be read, says where it comes from, and agrees with what its source states."""

import datetime
import tomllib
from importlib import resources

import pytest

from farpipe.core.catalog import (
    device_names,
    device_row,
    link_names,
    link_row,
    mode_names,
    mode_row,
    model_names,
    model_row,
    price_row,
    region_names,
)
from farpipe.core.spec import preset_model

ROWS = [(look_up, name) for look_up, names in [
    (device_row, device_names()), (model_row, model_names()), (link_row, link_names()), (price_row, region_names()),
    (mode_row, mode_names()),
] for name in names]  # fmt: skip


@pytest.mark.parametrize(("look_up", "name"), ROWS)
def test_every_row_carries_a_source_and_a_date(look_up, name):
    row = look_up(name)
    assert row.name == name
    assert len(row.source) > 15
    assert datetime.date(2015, 1, 1) <= row.date <= datetime.date.today()


@pytest.mark.parametrize("table", ["devices", "models", "links", "prices", "modes"])
def test_no_two_rows_answer_to_one_name(table):
    rows = tomllib.loads((resources.files("farpipe.core.catalog") / f"{table}.toml").read_text(encoding="utf-8"))
    names = [word for key, row in rows.items() for word in (key, *row.get("aliases", ()))]
    assert len(names) == len(set(names))
    assert all(name == name.lower().replace("_", "-") for name in names)


@pytest.mark.parametrize("name", device_names())
def test_figures_of_a_device_are_in_si_units_and_of_the_right_size(name):
    row = device_row(name)
    assert {"fp32"} <= set(row.peak_flops) <= {"bf16", "fp16", "fp8", "mxfp8", "nvfp4", "tf32", "fp32"}
    if name != "cpu":
        assert all(8e12 < rate <= 15e15 for rate in row.peak_flops.values())
        assert 11e9 < row.memory_bytes < 310e9
        assert 0.3e12 <= row.memory_bandwidth_bytes_per_s < 9e12
        assert 70 <= row.power_w <= 1400
        assert 15e9 < row.machine_link.bandwidth_bytes_per_s <= 900e9
    assert 1e-6 < row.machine_link.latency_s < 1e-4


def test_no_rate_is_the_one_with_sparsity():
    """Data sheets print the 2:4 sparse rate in the larger letters: twice of what a training run can use."""
    dense = {
        "a100-80gb": 312e12,
        "h100-sxm": 989.4e12,
        "h200": 989.4e12,
        "b200": 2250e12,
        "gb300": 2500e12,
        "mi355x": 2516.6e12,
        "rtx-4090": 165.2e12,
        "l40s": 362e12,
    }
    assert {name: device_row(name).peak_flops["bf16"] for name in dense} == dense


def test_a_device_without_bf16_says_so():
    assert "bf16" not in device_row("v100-32gb").peak_flops


@pytest.mark.parametrize(
    ("alias", "name"),
    [("H100", "h100-sxm"), ("a100", "a100-80gb"), ("RTX 4090", "rtx-4090"), ("A100_40GB", "a100-40gb")],
)
def test_devices_are_found_by_the_names_people_use(alias, name):
    assert device_row(alias).name == name


@pytest.mark.parametrize("name", model_names())
def test_number_of_parameters_is_the_published_one(name):
    row = model_row(name)
    assert preset_model(name).num_params == pytest.approx(row.published_params, rel=row.tolerance, abs=0.5)


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.2-1b", 1_235_814_400),  # tied
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512),  # biases of query, key and value alone
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("gpt2", 124_439_808),  # biases, learned positions, layer norm, tied
    ],
)
def test_released_checkpoints_are_counted_to_the_last_parameter(name, num_params):
    assert preset_model(name).num_params == num_params


def test_published_counts_are_tight():
    assert all(model_row(name).tolerance <= 0.03 for name in model_names())
    exact = [name for name in model_names() if model_row(name).tolerance == 0]
    assert len(exact) >= 15
    assert set(exact) > {name for name in model_names() if name.startswith("qwen")}


@pytest.mark.parametrize(
    ("look_up", "word", "hint"),
    [
        (device_row, "h1000", "did you mean 'h100'?"),
        (model_row, "lama-2-7b", "did you mean 'llama-2-7b'?"),
        (link_row, "accross-regions", "did you mean 'across-regions'?"),
        (device_row, "abacus", "known: v100-16gb, v100-32gb, "),
        (device_row, "a800-sxm4-80gb", "in the catalogue; known: "),  # another chip is not near
        (device_row, "h200-sxm5-80gb", "did you mean 'h200-sxm'?"),
    ],
)
def test_an_unknown_name_is_answered_with_a_known_one(look_up, word, hint):
    with pytest.raises(ValueError, match=rf"there is no \w+ '{word}' in the catalogue") as error:
        look_up(word)
    assert hint in str(error.value)


def test_slower_and_farther_links_come_later():
    classes = ["same-campus", "across-campuses", "same-region", "same-continent", "across-atlantic", "across-regions"]
    rows = [link_row(name) for name in classes]
    assert [row.latency_s for row in rows] == sorted(row.latency_s for row in rows)
    assert [row.bandwidth_bytes_per_s for row in rows] == sorted((r.bandwidth_bytes_per_s for r in rows), reverse=True)
