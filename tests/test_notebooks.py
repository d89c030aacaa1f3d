"""Notebooks are executed: their cells run in order, and give what is stored beside them.

Where an answer has changed on purpose, write the outputs anew and read what has changed:

    python tests/test_notebooks.py
"""

import ast
import io
import json
import os
from contextlib import chdir, redirect_stdout
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
KINDS = {"image/svg+xml": "_repr_svg_", "text/html": "_repr_html_"}


def outputs_of(cells):
    """The outputs of code cells, in the notebook's format, as Jupyter makes them: what is printed, the last value."""
    names = {"__name__": "__main__"}
    for number, source in enumerate(cells, 1):
        body = ast.parse(source).body
        last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
            value = None if last is None else eval(compile(last, f"cell {number}", "eval"), names)
        streams = [{"name": "stdout", "output_type": "stream", "text": lines_of(printed.getvalue())}]
        found = [stream for stream in streams if stream["text"]]
        if value is not None:
            shown = {"data": data_of(value), "metadata": {}}
            found.append({"execution_count": number, "output_type": "execute_result"} | shown)
        yield found


def data_of(value):
    pictures = {kind: getattr(value, name, lambda: None)() for kind, name in KINDS.items()}
    return {kind: lines_of(text) for kind, text in [*pictures.items(), ("text/plain", repr(value))] if text}


def lines_of(text):
    return text.splitlines(keepends=True)


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed(path):
    """(cell, its outputs now) of every code cell."""
    cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
    with chdir(path.parent):
        return list(zip(cells, outputs_of("".join(cell["source"]) for cell in cells), strict=True))


def comparable(outputs):
    """What is compared: all text; of pictures only that they are there."""
    return [
        output.get("text") or {kind: lines if kind == "text/plain" else bool(lines) for kind, lines in data.items()}
        for output in outputs
        for data in [output.get("data", {})]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_gives_what_is_stored_in_it(path):
    for cell, outputs in executed(path):
        assert comparable(outputs) == comparable(cell["outputs"]), "".join(cell["source"])


def test_there_is_a_notebook_with_every_kind_of_output():
    text = "".join(path.read_text(encoding="utf-8") for path in NOTEBOOKS)
    assert all(f'"{kind}"' in text for kind in (*KINDS, "text/plain", "stdout"))


def write(path):
    """Write the outputs of a notebook anew."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = code_cells(notebook)
    for number, (cell, (_, outputs)) in enumerate(zip(cells, executed(path), strict=True), 1):
        cell.update(outputs=outputs, execution_count=number)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + os.linesep, encoding="utf-8")


if __name__ == "__main__":
    for place in NOTEBOOKS:
        write(place)
