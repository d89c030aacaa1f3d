"""docs/reference/job.md says what the code does."""

import re
from pathlib import Path

import pytest

from farpipe.core.catalog import device_names, link_names, model_names, region_names
from farpipe.core.errors import InputError
from farpipe.core.spec import Data, Model, Pins, Prices, Training, parse_job
from farpipe.core.spec.link_matrices import WrittenMatrices
from farpipe.core.spec.training import Lora
from farpipe.core.spec.written import WrittenDevice, WrittenLink, WrittenSchedule, WrittenSite

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "job.md").read_text(encoding="utf-8")


def keys_of(*headings):
    """The keys in the tables of the sections below `headings`."""
    sections = [PAGE.split(f"## {heading}\n")[1].split("\n## ")[0] for heading in headings]
    rows = [line.split("|")[1] for section in sections for line in section.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def keys_in(*tables):
    """The keys that the code reads in `tables`."""
    return {field.alias or name for table in tables for name, field in table.model_fields.items()}


@pytest.mark.parametrize(
    ("heading", "keys"),
    [
        ("[model]", keys_in(Model) | {"preset"}),
        ("[training]", keys_in(Training)),
        ("[training.lora]", keys_in(Lora)),
        ("[data]", keys_in(Data)),
        ("[[cluster.sites]]", keys_in(WrittenSite, WrittenDevice, Prices)),
        ("[[cluster.links]]", keys_in(WrittenLink)),
        ("[cluster.matrices]", keys_in(WrittenMatrices)),
        ("[layout]", keys_in(Pins)),
        ("[schedule]", keys_in(WrittenSchedule)),
    ],
)
def test_the_reference_has_every_key_and_no_other(heading, keys):
    assert keys_of(heading) == keys


@pytest.mark.parametrize("table", [Model, Training, Data])
def test_the_reference_has_every_default(table):
    section = PAGE.split(f"## [{table.__name__.lower()}]\n")[1].split("\n## ")[0]
    for name, field in table.model_fields.items():
        row = next(line for line in section.splitlines() if line.startswith(f"| `{name}`"))
        default = row.split("|")[3].strip()
        if field.is_required():
            assert "required" in default
        elif isinstance(field.default, bool | int | float | str | tuple):
            shown = default.strip("`").split("`")[-1].strip('"') if name == "name" else default.strip("`")
            assert shown == as_written(field.default)


def as_written(value):
    """A default as the reference shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    if value == "custom":
        return value
    return f'"{value}"' if isinstance(value, str) else {3e-4: "3e-4"}.get(value, str(value))


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
