"""Write the tables of docs/reference/job.md from the docstrings of the fields of a job: ``python docs/job.py``."""

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
from farpipe.core.spec.part import Part
from farpipe.core.spec.training import Lora, MetricsSettings
from farpipe.core.spec.written import WrittenDevice, WrittenModel, WrittenSchedule, WrittenSite

PAGE: Final = Path(__file__).parent / "reference" / "job.md"
TABLES: Final[Sequence[Sequence[type[Part]]]] = (
    (WrittenModel, Model),
    (Training,),
    (Lora,),
    (Data,),
    (WrittenSite,),
    (WrittenDevice,),
    (Prices,),
    (WrittenLink, WrittenSpeed),
    (WrittenMatrices,),
    (Pins,),
    (WrittenSchedule,),
    (MetricsSettings,),
)
"""The tables of the page in their order, and whose fields each one has."""
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
    body = ast.parse(inspect.getsource(part)).body[0].body  # type: ignore[attr-defined]
    for field, doc in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
            name = ast.unparse(field.target)
            meaning = " ".join(ast.literal_eval(doc.value).split())
            yield f"| `{part.model_fields[name].alias or name}` | {meaning} | {_default(part.model_fields[name])} |\n"


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
