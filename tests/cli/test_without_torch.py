"""PyTorch is optional: what needs it names the extra to install, before anything is written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interop.test_link_tests import PING
from interop.test_logs import megatron
from interop.test_megatron import SCRIPT
from job_files import SMALL_MODEL, cluster_text

TRAINING = '\n[training]\nsequence_length = 32\nglobal_batch = 4\nnum_steps = 2\nprecision = "fp32"\n\n'
JOB = SMALL_MODEL + TRAINING + cluster_text()
SRC = Path(__file__).parents[2] / "src"
HIDE_TORCH = "import sys, doors; sys.meta_path.insert(0, doors.NoTorch())"


@pytest.fixture
def farpipe(tmp_path):
    """`farpipe(*arguments)` on a Python that has no PyTorch; the finished process."""
    hidden, folder = tmp_path / "hidden", tmp_path / "work"
    hidden.mkdir()
    folder.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDE_TORCH)
    (folder / "job.toml").write_text(JOB)
    paths = [str(hidden), str(SRC), str(SRC.parent / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(hidden)}

    def run(*arguments):
        command = [sys.executable, "-m", "farpipe", *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "job.toml"),
        ("train", "job.toml", "--device", "sleep"),
        ("profile", "job.toml"),
        ("export", "runs/last", "--format", "hugging-face", "-o", "model"),
    ],
    ids=" ".join,
)
def test_what_needs_torch_names_the_extra_and_leaves_nothing_behind(farpipe, tmp_path, arguments):
    result = farpipe(*arguments)
    assert (result.returncode, result.stdout) == (3, "")
    assert "needs PyTorch: pip install 'farpipe[train]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["job.toml"]
    assert {path.name for path in (tmp_path / "hidden").iterdir()} <= {"sitecustomize.py", "__pycache__"}


COMMANDS = """\
plan job.toml --html plan.html
plan packed.toml -o packed.json
plan job.toml -o learned.json --learned-from run
pareto job.toml --objective time,energy
sweep job.toml --over training.num_steps=1,2 --plot sweep.png
schedule plan.json --method 1f1b
schedule packed.toml --method gpipe
compare plan.json --method 1f1b --plot compare.svg
compare packed.json --method gpipe
simulate plan.json --html report.html --perfetto trace.json
simulate packed.toml --plot packed.svg
sequences plan packed.toml --html batch.html
lengths --job packed.toml
lengths text.jsonl
check job.toml --log train.log --tolerance 1e6 --html check.html
check packed.toml --log train.log --tolerance 1e6
check job.toml --log run --tolerance 1e6
import train.sh --set 1=1 -o imported.toml
import train.log
import ping.txt
export plan.json
export plan.json --format torch-csv-comms
export plan.json --format megatron
export plan.json --format nemo
export plan.json --format torchtitan
export run
report run -o run.html
prepare job.toml --run-dir runs/1
prepare job.toml --run-dir runs/2 --format sbatch
prepare job.toml --run-dir runs/3 --format skypilot
prepare job.toml --run-dir runs/4 --format jobset
prepare packed.toml --run-dir runs/5
prepare job.toml --resume run --steps 4
prepare packed.toml --resume chunks --steps 4
list models
list devices
validate
certs init certs
certs issue certs zurich
optical blocking --load 20 --set requests=200
optical simulate plan.json --set placements=1 --load 0
optical compare plan.json --set placements=1 --load 0
list policies
fleet simulate fleet.toml --jobs jobs.csv --policy fcfs
fleet compare fleet.toml --jobs jobs.csv --policy fcfs,farpipe
"""
SAMPLES = {
    "train.sh": SCRIPT,
    "ping.txt": PING,
    "train.log": "".join(megatron(step, 1000.0, 4) + "\n" for step in range(1, 14)),
    "jobs.csv": "job,submit_s,model,sequence_length,global_batch,num_steps,min_devices,max_devices,tenant\n"
    "a,1,llama-3-8b,4096,256,20,16,32,one\n",
}
ALL = """
import json, sys
sys.path.insert(0, sys.argv[1])
import doors
sys.meta_path.insert(0, doors.NoTorch())
print(json.dumps({line: doors.command(*line.split()) for line in sys.argv[2].splitlines()}))
"""


@pytest.mark.slow
def test_what_trains_nothing_needs_no_torch(tmp_path):
    """Every command but those that compute, and `probe` and `wan`, which need another machine and root."""
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "a" * size}) + "\n" for size in range(2, 90)))
    (tmp_path / "fleet.toml").write_text((SRC.parent / "recipes" / "fleet" / "three_clusters.toml").read_text())
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "packed.toml").write_text(JOB + '\n[data]\nsource = "text.jsonl"\npacking = "elastic"\n')
    for name, text in SAMPLES.items():
        (tmp_path / name).write_text(text)
    for job, run in (("job.toml", "run"), ("packed.toml", "chunks")):  # with torch
        trained = [sys.executable, "-m", "farpipe", "train", job, "--run-dir", run]
        subprocess.run(trained, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(SRC)}, check=True, timeout=240)
    asked = [sys.executable, "-c", ALL, str(SRC.parent / "tests"), COMMANDS]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=True)
    answers = json.loads(done.stdout.splitlines()[-1])
    assert {line: errors for line, (code, _, errors) in answers.items() if code} == {}
