"""The jobs that farpipe ships."""

from pathlib import Path

import pytest

from farpipe.core.spec import load_job

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert {"two_sites.toml", "three_sites_asymmetric.toml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(path):
    job = load_job(path)
    assert job.text == path.read_text(encoding="utf-8")


def test_the_asymmetric_recipe_is_asymmetric():
    cluster = load_job(RECIPES[0].with_name("three_sites_asymmetric.toml")).cluster
    there, back = cluster.link("paris", "virginia"), cluster.link("virginia", "paris")
    assert there.bandwidth_bytes_per_s > back.bandwidth_bytes_per_s
    assert len({site.device.name for site in cluster.sites}) == 3
