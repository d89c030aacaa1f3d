import json

import pytest
from typer.testing import CliRunner

from farpipe.cli.app import app
from farpipe.core.step import Schedule


def test_a_schedule_goes_out_as_csv_and_comes_back(farpipe, problem_file, tmp_path):
    assert farpipe("schedule", problem_file, "--method", "1f1b", "-o", "s.json").returncode == 0
    shown = farpipe("export", "s.json")
    assert shown.stdout == "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    assert farpipe("export", "s.json", "--format", "torch-csv", "-o", "s.csv").returncode == 0
    assert (tmp_path / "s.csv").read_text() == shown.stdout
    run = farpipe("import", "s.csv", "-o", "back.json", "--json")
    assert run.returncode == 0, run.stderr
    back = Schedule.load(tmp_path / "back.json")
    assert back.ranks == Schedule.load(tmp_path / "s.json").ranks
    assert json.loads(run.stdout) == back.to_data()
    assert "rank 1: 1F0 1B0" in farpipe("import", "s.csv").stdout


def test_a_cell_that_is_no_action_is_named(farpipe, tmp_path):
    (tmp_path / "s.csv").write_text("0F0,0B0\n1F0x,1B0\n")
    run = farpipe("import", "s.csv")
    assert run.returncode == 3
    assert "s.csv: row 2, column 1: expected an action such as '0F0' or '3W12', found '1F0x'" in run.stderr


def test_what_can_not_be_exported_is_told(farpipe, problem_file):
    run = farpipe("export", problem_file)
    assert run.returncode == 3
    assert "expected a plan, a schedule or a run, found format 'farpipe/problem/1'" in run.stderr
    run = farpipe("export", problem_file, "--format", "hugging-face")
    assert run.returncode == 2
    assert "weights need a folder" in run.stderr
    run = farpipe("export", ".", "--format", "hugging-face", "-o", "out")
    assert run.returncode == 3
    assert "neither a run with a whole checkpoint" in run.stderr


@pytest.mark.parametrize(
    ("name", "said"), [("config.json", True), ("tokenizer.json", False), ("adapter_config.json", False)]
)
def test_weights_without_a_tokenizer_are_told_so(name, said, tmp_path, monkeypatch):
    folder = tmp_path / "out"

    def write(source, folder, *, dtype):
        folder.mkdir()
        (folder / name).write_text("{}")
        return 4

    monkeypatch.setattr("farpipe.engine.checkpoint.export.export_to_hugging_face", write)
    shown = CliRunner().invoke(app, ["export", str(tmp_path), "--format", "hugging-face", "-o", str(folder)]).stdout
    assert f"weights after 4 steps written to {folder}" in shown
    assert ("no tokenizer in" in shown) is said
