"""Mixtures of experts and latent attention, counted to the last parameter."""

import pytest

from farpipe.catalog import model_row
from farpipe.errors import InputError
from farpipe.spec import Model, parse_job, preset_model
from job_files import added


@pytest.mark.parametrize(
    ("name", "num_params", "active"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12.9e9),
        ("mixtral-8x22b", 140_620_634_112, 39.1e9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.35e9),
        ("qwen3-235b-a22b", 235_093_634_560, 22.2e9),
        ("deepseek-v3", 671_026_419_200, 37.6e9),
        ("gpt-oss-120b", 116_829_156_672, 5.71e9),
        ("gpt-oss-20b", 20_914_757_184, 4.19e9),
    ],
)
def test_published_mixtures_are_counted_exactly(name, num_params, active):
    model = preset_model(name)
    assert model.num_params == model_row(name).published_params == num_params
    assert model.num_active_params == pytest.approx(active, rel=0.01)


def test_a_dense_model_is_active_as_a_whole():
    model = preset_model("llama-3-8b")
    assert model.num_active_params == model.num_params


def test_more_experts_per_token_than_there_are_is_an_error_that_names_the_place():
    table = "experts = { num_experts = 4, per_token = 5, ffn_hidden = 64 }"
    with pytest.raises(InputError, match=r"model.experts.per_token: 5 of 4 experts"):
        parse_job(added("model", table))


def test_a_job_with_experts_survives_its_file():
    job = parse_job(added("model", "experts = { num_experts = 4, per_token = 2, ffn_hidden = 64 }"))
    assert parse_job(job.model_copy(update={"text": ""}).to_toml()).model == job.model
    assert isinstance(job.model, Model)
