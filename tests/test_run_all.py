"""The pages of benchmarks: what is not run and what is written by hand stays, and what fails says so."""

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
    "nowhere": "raise AssertionError('no page has its section')",
}
PAGE = """\
# Engine

By hand.

## broken

Not measured yet.

## good

<!-- good: written by make bench -->

old

<!-- good: end -->

What `good` means, by hand.

## never

<!-- never: written by make bench -->

kept

<!-- never: end -->

## strict

Measured by hand.

## Trainings over light paths

By hand too, with a table.

| a |
|---|
| 7 |
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
    monkeypatch.setattr(module, "PAGES", tmp_path)
    (tmp_path / "another.md").write_text("# Planner\n\n## another\n")
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
    assert (
        "## good\n\n<!-- good: written by make bench -->\n\nWhat good does.\n\n    python benchmarks/good.py\n" in page
    )
    assert "| seconds: first | 1.5 |" in page
    assert "| a |\n|---|\n| 1 |\n| 2 |" in page
    head, end = PAGE.index("<!-- good: written"), PAGE.index("<!-- good: end -->")
    assert page.startswith(PAGE[:head])
    assert page.endswith(PAGE[end:])


def test_a_second_run_replaces_what_the_first_wrote(run_all):
    first, _ = run_all("good", "broken", "strict")
    assert run_all("strict", "broken", "good") == (first, "failed: strict, broken")


def test_figures_come_above_what_is_written_by_hand(run_all):
    page, _ = run_all("strict")
    by_hand = PAGE.index("## strict\n") + len("## strict\n")
    assert page.startswith(f"{PAGE[:by_hand]}\n<!-- strict: written by make bench -->\n\nWhat strict does.\n")
    assert page.endswith(f"| grew | 3 |\n\n<!-- strict: end -->\n{PAGE[by_hand:]}")


def test_without_names_all_that_are_marked_are_run(run_all):
    page, code = run_all()
    assert code == "failed: never"
    assert "Not measured yet." in page
    assert "| seconds: first | 1.5 |" in page
    assert "it is not asked for" in page
    assert "<!-- strict: written by make bench -->" not in page


def test_a_benchmark_without_a_section_is_not_run(run_all):
    page, code = run_all("good", "nowhere")
    assert code == 2
    assert page == PAGE


def test_a_mark_without_its_end_changes_nothing(run_all, tmp_path):
    damaged = PAGE.replace("<!-- good: end -->", "")
    (tmp_path / "page.md").write_text(damaged)
    page, code = run_all("good")
    assert page == damaged
    assert "<!-- good: written by make bench --> has no <!-- good: end --> behind it" in code


def test_a_benchmark_that_fails_says_so_and_the_next_is_run(run_all):
    page, code = run_all("broken", "strict", "good")
    assert code == "failed: broken, strict"
    assert "**It failed** (exit code 1): `no such device`" in page
    assert "**A limit was not kept** (exit code 1).\n\n| figure | value |\n|---|---|\n| grew | 3 |" in page
    assert "| seconds: first | 1.5 |" in page


def test_an_unknown_benchmark_is_named(run_all, capsys):
    assert run_all("god")[1] == 2
    assert "there is no benchmark 'god'; known: broken, good, never, nowhere, strict" in capsys.readouterr().err
