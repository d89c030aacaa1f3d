"""The page on concepts: its table and pictures are those of its code."""

from pathlib import Path

import test_docs

PAGE = Path(__file__).parents[1] / "docs" / "concepts.md"


def test_the_code_of_the_page_gives_its_table_and_pictures():
    text, names = PAGE.read_text(encoding="utf-8"), {}
    (code,) = [body for kind, body in test_docs.FENCE.findall(text) if kind == "python"]
    exec(code, names)
    assert all(row in text for row in names["rows"])
    for name in ("near", "far"):
        picture = PAGE.parent / "pictures" / f"concepts_{name}.svg"
        assert picture.read_text(encoding="utf-8") == names[name].svg(), f"write {picture.name} anew"
