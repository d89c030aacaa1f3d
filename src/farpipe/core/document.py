"""The base of the types that are saved as JSON under a format name and loaded strictly."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from farpipe.core.strict import expect_format, parse_json, read_text, write_text


class Table(BaseModel):
    """Base of what a document is made of: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Document:
    """Mixin: a type names its `FORMAT` and turns itself into data and back with `to_body` and `from_body`."""

    FORMAT: ClassVar[str]
    INDENT: ClassVar[int | None] = None
    """Indentation of the JSON; None: all in one line."""

    def to_body(self) -> dict[str, Any]:
        """All that is said, for JSON, without the format's name."""
        raise NotImplementedError

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        """The inverse of `to_body`; InputError names the place of whatever is wrong."""
        raise NotImplementedError

    def to_data(self) -> dict[str, Any]:
        """All that is said, for JSON, with the format's name first."""
        return {"format": self.FORMAT, **self.to_body()}

    @classmethod
    def from_data(cls, data: Any, source: str = "") -> Self:
        """The inverse of `to_data`; InputError names the place of whatever is wrong, another format too.

        `source` is what errors begin with: a file's name, or else the name of the type as in `FORMAT`.
        """
        source = source or cls.FORMAT.split("/")[1]
        return cls.from_body(expect_format(data, cls.FORMAT, source), source)

    def to_json(self) -> str:
        """The document in its format."""
        return json.dumps(self.to_data(), indent=self.INDENT, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        """Read what `to_json` gives; InputError names the place of whatever is wrong."""
        source = source or cls.FORMAT.split("/")[1]
        return cls.from_data(parse_json(text, source), source)

    def _repr_svg_(self) -> str | None:
        # The one name of a package above: documents are below everything, and what draws them knows them all. Handing
        # the function down at import was a global that others could set; a notebook is the one place that asks.
        picture: str | None = import_module("farpipe.report.gantt").svg_of(self)
        return picture

    def save(self, path: Path | str) -> None:
        """Write it to `path`, whole or not at all; RunError when it can't be written."""
        write_text(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file; InputError when it is missing or something else."""
        return cls.from_json(read_text(path), str(path))
