"""Write the tables of docs/reference/job.md, and job.schema.json beside it, from the fields of a job and their
docstrings: ``python docs/job.py``."""

import ast
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from farpipe.core.spec import Data, Model, Pins, Prices, Training
from farpipe.core.spec.links import WrittenLink, WrittenMatrices, WrittenSpeed
from farpipe.core.spec.local_steps import LocalSteps
from farpipe.core.spec.lora import Lora
from farpipe.core.spec.part import Part
from farpipe.core.spec.publish import PublishSettings
from farpipe.core.spec.run_keys import MetricsSettings, RunKeys
from farpipe.core.spec.written import WrittenDevice, WrittenJob, WrittenModel, WrittenSchedule, WrittenSite

PAGE: Final = Path(__file__).parent / "reference" / "job.md"
TABLES: Final[Sequence[Sequence[type[Part]]]] = (
    (WrittenModel, Model),
    (Training,),
    (Lora,),
    (LocalSteps,),
    (Data,),
    (WrittenSite,),
    (WrittenDevice,),
    (Prices,),
    (WrittenLink, WrittenSpeed),
    (WrittenMatrices,),
    (Pins,),
    (WrittenSchedule,),
    (MetricsSettings,),
    (RunKeys,),
    (PublishSettings,),
)
"""The tables of the page in their order, and whose fields each one has."""
SCHEMA: Final = PAGE.with_name("job.schema.json")
HEAD: Final = "| key | meaning | default |\n|---|---|---|\n"


def page(text: str) -> str:
    """`text` of the page with its tables written anew."""
    parts = re.split(re.escape(HEAD) + r"(?:\|.*\n)*", text)
    if len(parts) != len(TABLES) + 1:
        raise SystemExit(f"{PAGE}: expected {len(TABLES)} tables of keys, found {len(parts) - 1}")
    tables = [HEAD + "".join(row for part in table for row in rows(part)) for table in TABLES]
    return parts[0] + "".join(table + part for table, part in zip(tables, parts[1:], strict=True))


def rows(part: type[Part]) -> Iterator[str]:
    """One row for each field that the class itself has."""
    for name, meaning in meanings(part).items():
        yield f"| `{part.model_fields[name].alias or name}` | {meaning} | {_default(part.model_fields[name])} |\n"


def meanings(part: type[Part]) -> dict[str, str]:
    """The docstring of each field that the class itself has."""
    body = ast.parse(inspect.getsource(part)).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(doc.value).split())
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }


def schema() -> dict[str, Any]:
    """The JSON Schema of job.toml, with which editors complete and check; farpipe itself checks more."""
    found = WrittenJob.model_json_schema()
    model = Model.model_json_schema()
    found["$defs"] |= model.pop("$defs")
    written = found["$defs"]["WrittenModel"]
    written["properties"] |= model["properties"]
    written["additionalProperties"] = False
    for table in TABLES:
        shown = found["$defs"][table[0].__name__]["properties"]
        for part in table:
            for name, meaning in meanings(part).items():
                shown[part.model_fields[name].alias or name]["description"] = meaning
    found["$defs"]["Training"]["properties"]["zero1"] = {"type": "boolean", "description": "true: `zero = 1`."}
    for table in (found, *found["$defs"].values()):
        for value in table["properties"].values():
            value.pop("title", None)
            if isinstance(value.get("default"), dict) or value.get("default", 0) is None:
                del value["default"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | found | {"title": "job.toml of farpipe"}


def _default(field: Any) -> str:
    """The default as a file has it; empty where only the description can say it."""
    value = field.default
    if field.is_required():
        return "required"
    if isinstance(value, bool | str):
        return f"`{json.dumps(value)}`"
    if isinstance(value, int | float):
        return f"`{value:g}`" if value < 1e6 else ""  # a quantity, which a file gives with its unit
    return f"`{json.dumps(value)}`" if isinstance(value, tuple) and value else ""


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
