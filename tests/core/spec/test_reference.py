"""docs/reference/job.md says what the code does."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import jsonschema
import pytest

from farpipe.core.catalog import device_names, link_names, model_names, region_names
from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "reference" / "job.md").read_text(encoding="utf-8")
SCHEMA = json.loads((DOCS / "reference" / "job.schema.json").read_text(encoding="utf-8"))
SCRIPT = runpy.run_path(str(DOCS / "job.py"))


def test_the_tables_are_those_of_the_code():
    assert SCRIPT["page"](PAGE) == PAGE, "run python docs/job.py"


def test_the_schema_is_that_of_the_code():
    assert SCRIPT["schema"]() == SCHEMA, "run python docs/job.py"


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.toml")), ids=lambda path: path.name)
def test_the_schema_takes_the_recipes(path):
    jsonschema.validate(tomllib.loads(path.read_text(encoding="utf-8")), SCHEMA)


def test_the_schema_takes_the_example_and_no_slip():
    job = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL).group(1))
    jsonschema.validate(job, SCHEMA)
    for table, key, value in [
        (job["model"], "num_layer", 2),
        (job["training"], "precision", "int3"),
        (job["cluster"]["links"][0], "latency", 6),
        (job["cluster"]["sites"][1]["device"], "power", 300),
    ]:
        before = dict(table)
        table[key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(job, SCHEMA)
        table.clear()
        table.update(before)


@pytest.mark.parametrize("part", sorted({part for table in SCRIPT["TABLES"] for part in table}, key=repr))
def test_every_key_has_a_row(part):
    names = {row.split("`")[1] for row in SCRIPT["rows"](part)}
    assert names == {field.alias or name for name, field in part.model_fields.items() if name in part.__annotations__}


def test_the_reference_has_every_preset():
    presets = set(re.findall(r"`([^`]+)`", PAGE.split("## Presets\n")[1].split("\n## ")[0]))
    assert {*model_names(), *device_names(), *link_names(), *region_names()} <= presets


def test_the_example_loads():
    example = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL).group(1)
    job = parse_job(example)
    assert job.layout.sites == ("zurich", "lugano")
    assert job.cluster.sites[1].device.power_w == 300


def test_the_example_of_a_mistake_is_what_is_said():
    example = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL).group(1)
    said = re.search(r"```text\n(.*?)\n```", PAGE, re.DOTALL).group(1)
    with pytest.raises(InputError) as error:
        parse_job(example.replace('["zurich", "lugano"]', '["zurich", "lugno"]', 1))
    assert str(error.value) == said
