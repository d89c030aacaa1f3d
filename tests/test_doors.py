"""One job has one plan, whichever door asks for it, and whether or not PyTorch is there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chosen import chosen
from farpipe.core.errors import InputError
from farpipe.core.spec import load_job

ROOT = Path(__file__).parent.parent


def is_job(path):
    try:
        load_job(path)
    except InputError:
        return False
    return True


JOBS = [path for path in sorted(ROOT.glob("recipes/**/*.toml")) if is_job(path)]
CHOSEN = [place for place, path in enumerate(JOBS) if path.stem in ("two_sites", "long_documents")]


def asked(path, folder, *words):
    """What every door answers, asked in a process of its own."""
    folder.mkdir()
    command = [sys.executable, ROOT / "tests" / "doors.py", path, folder, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_recipes_have_jobs_of_both_kinds():
    packing = [load_job(path).data.packing for path in JOBS]
    assert len(JOBS) >= 5
    assert None in packing
    assert "elastic" in packing


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", chosen(JOBS, *CHOSEN), ids=lambda path: path.stem)
def test_every_door_gives_the_same_plan_with_torch_and_without(recipe, tmp_path):
    path = tmp_path / recipe.name
    path.write_text(re.sub(r"global_batch = \d{3,}", "global_batch = 32", recipe.read_text()))  # else it takes minutes
    found = asked(path, tmp_path / "with")
    assert asked(path, tmp_path / "without", "no-torch") == found
    assert found["the file's plan"] == found["of a request"] == found["planning.plan"]
    assert found["plan"] == found["explained"]
    assert found["prepare"] == found["within the engine"] or "the engine can't run this yet" in found["prepare"]
    assert found["prepare says"]
    assert found["simulate"] == found["makespan_s"]
    for door in ("schedule", "compare"):  # the bound of the step, or why the order can't be used
        assert found[door] == found["gpipe"] or str(found["gpipe"]) in str(found[door])
    assert found["check"] == found["step_s"]
    if load_job(path).data.packing is None:
        assert (found["sweep"][0], found["pareto"][0]) in ((0, 0), (0, 4))  # 4: no prices
        assert found["quote"] == pytest.approx(found["step_s"], rel=0.3)
        return
    assert found["prepare"] == found["plan"]
    assert found["quote"] == found["step_s"]
    assert found["sweep"][0] == found["pareto"][0] == 3
    assert all("data.packing" in found[door][1] for door in ("sweep", "pareto"))
