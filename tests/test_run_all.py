"""Files of benchmarks' figures: those that are not run stay, and so do the pages; failures are in the file."""

import sys

import pytest

import benchmarks.run_all

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
    "elsewhere": "sys.exit(2)",
    "table": "print('| a |\\n|---|\\n| ' + ' '.join(sys.argv[1:]) + ' |')",
    "nowhere": "raise AssertionError('no page has its section')",
}
PAGE = "# Engine\n\n" + "".join(
    f"By hand.\n\n    python -m benchmarks.kind.{name}\n" for name in SCRIPTS if name != "nowhere"
)
BENCH = "Written by `make bench`."
BEFORE = {
    "good": f"{BENCH}\n\n## By hand\n\nkept\n",
    "never": f"{BENCH} kept\n",
    "elsewhere": f"{BENCH} measured where there is data\n",
    "table": "# table\n\nAn older one.\n",
}


@pytest.fixture
def run_all(tmp_path, monkeypatch):
    """`run_all(*names)` over SCRIPTS, of which four were run before: the files by name, and the exit code."""
    folder = tmp_path / "benchmarks" / "kind"
    folder.mkdir(parents=True)
    for name, body in SCRIPTS.items():
        (folder / f"{name}.py").write_text(SCRIPT.format(about=f"What {name} does", body=body))
    monkeypatch.setattr(benchmarks.run_all, "HERE", folder.parent)
    monkeypatch.setattr(benchmarks.run_all, "PAGES", tmp_path)
    (tmp_path / "another.md").write_text("# Planner\n\n## another\n")
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "raw").mkdir()
    for name, text in BEFORE.items():
        (tmp_path / "raw" / f"{name}.md").write_text(text)

    def run(*names):
        monkeypatch.setattr(sys, "argv", ["run_all.py", *names])
        code = 0
        try:
            benchmarks.run_all.main()
        except SystemExit as end:
            code = end.code
        assert (tmp_path / "page.md").read_text() == PAGE
        return {path.stem: path.read_text() for path in (tmp_path / "raw").iterdir()}, code

    return run


def test_one_file_is_written_and_the_others_are_kept(run_all):
    files, code = run_all("good")
    assert code == 0
    good = files.pop("good")
    assert files == {name: text for name, text in BEFORE.items() if name != "good"}
    assert good.startswith("# good\n\nWritten by `make bench`; its meaning is on [the page](../page.md).\n\n")
    assert "What good does.\n\n    python -m benchmarks.kind.good\n" in good
    assert "| seconds: first | 1.5 |" in good
    assert "| a |\n|---|\n| 1 |\n| 2 |" in good
    assert good.endswith("\n\n## By hand\n\nkept\n")


def test_a_second_run_replaces_what_the_first_wrote(run_all):
    first, _ = run_all("good", "broken", "strict")
    assert run_all("strict", "broken", "good") == (first, "failed: strict, broken")


def test_a_table_is_shown_as_it_was_printed_under_its_options(run_all):
    run_all("table", "--", "--draws", "4")
    table = run_all("table", "--", "--draws", "4")[0]["table"]
    assert table.startswith(
        BEFORE["table"] + "\n## --draws 4\n\nWhat table does.\n\n    python -m benchmarks.kind.table"
    )
    assert table.endswith("\n\n| a |\n|---|\n| --draws 4 |\n")
    assert table.count("## --draws 4") == 1


def test_rows_become_a_table_and_all_else_stays_as_it_looks():
    rows = '{"a": 1, "b": 2.5}\n{"a": 2, "b": null}\n'
    assert benchmarks.run_all.markdown(rows) == "**rows**\n\n| a | b |\n|---|---|\n| 1 | 2.5 |\n| 2 | \N{EN DASH} |\n"
    assert benchmarks.run_all.markdown("34 trainings\n") == "```text\n34 trainings\n```\n"


def test_a_table_of_a_command_without_options_begins_the_file(run_all):
    table = run_all("table")[0]["table"]
    assert table.startswith("# table\n\nWritten by `python -m benchmarks.run_all table`; its meaning is on [the page]")


def test_without_names_all_of_make_bench_are_run(run_all):
    files, code = run_all()
    assert code == "failed: never"
    assert files.keys() == BEFORE.keys()
    assert "| seconds: first | 1.5 |" in files["good"]
    assert "it is not asked for" in files["never"]


def test_what_can_not_be_measured_here_keeps_its_figures(run_all):
    assert run_all("elsewhere") == (BEFORE, 0)


def test_a_benchmark_without_a_section_is_not_run(run_all):
    assert run_all("good", "nowhere") == (BEFORE, 2)


def test_a_benchmark_that_fails_says_so_and_the_next_is_run(run_all):
    files, code = run_all("broken", "strict", "good")
    assert code == "failed: broken, strict"
    assert "**It failed** (exit code 1): `no such device`" in files["broken"]
    assert "**A limit was not kept** (exit code 1).\n\n| figure | value |\n|---|---|\n| grew | 3 |" in files["strict"]
    assert "| seconds: first | 1.5 |" in files["good"]


def test_an_unknown_benchmark_is_named(run_all, capsys):
    assert run_all("god") == (BEFORE, 2)
    known = "broken, elsewhere, good, never, nowhere, strict, table"
    assert f"there is no benchmark 'god'; known: {known}" in capsys.readouterr().err
