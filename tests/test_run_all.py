"""The page of benchmarks: what is not run stays, and what fails says so."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "benchmarks" / "run_all.py"
SCRIPT = '''"""{about}.

More."""
import json, sys
if __name__ == "__main__":
    {body}
'''
SCRIPTS = {
    "broken": "sys.exit('no such device')",
    "good": "print(json.dumps({'seconds': {'first': 1.5}, 'rows': [{'a': 1}, {'a': 2}]}))",
    "strict": "print(json.dumps({'grew': 3})); sys.exit(1)",
    "never": "raise AssertionError('it is not asked for')",
}
PAGE = """\
# Benchmarks

## good

old

## gone

of a script that there is no more

## never

kept
"""


@pytest.fixture
def run_all(tmp_path, monkeypatch):
    """`run_all(*names)` over SCRIPTS; the page and the exit code."""
    spec = importlib.util.spec_from_file_location("run_all", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, body in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(about=f"What {name} does", body=body))
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(PAGE)

    def run(*names):
        monkeypatch.setattr(sys, "argv", ["run_all.py", *names])
        try:
            module.main()
        except SystemExit as end:
            return (tmp_path / "page.md").read_text(), end.code
        return (tmp_path / "page.md").read_text(), 0

    return run


def test_one_section_is_refreshed_and_the_others_are_kept(run_all):
    page, code = run_all("good")
    assert code == 0
    assert "old" not in page
    assert "## good\n\nWhat good does.\n\n    python benchmarks/good.py\n" in page
    assert "| seconds: first | 1.5 |" in page
    assert "| a |\n|---|\n| 1 |\n| 2 |" in page
    assert "\n## never\n\nkept\n" in page
    assert "## gone" not in page


def test_a_benchmark_that_fails_says_so_and_the_next_is_run(run_all):
    page, code = run_all("broken", "strict", "good")
    assert code == "failed: broken, strict"
    assert "**It failed** (exit code 1): `no such device`" in page
    assert "**A limit was not kept** (exit code 1).\n\n| figure | value |\n|---|---|\n| grew | 3 |" in page
    assert "| seconds: first | 1.5 |" in page
    assert page.index("## broken") < page.index("## good") < page.index("## never") < page.index("## strict")


def test_an_unknown_benchmark_is_named(run_all, capsys):
    assert run_all("god")[1] == 2
    assert "there is no benchmark 'god'; known: broken, good, never, strict" in capsys.readouterr().err
