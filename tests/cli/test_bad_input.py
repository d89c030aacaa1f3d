"""Whatever the user gives: one message that names the place, an exit code that scripts can use, never a traceback."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from farpipe import planning
from planning.planner.jobs import job, site

RECIPES = Path(__file__).parents[2] / "recipes"
JOB = RECIPES / "two_sites.toml"

FILES = {
    "empty.json": b"",
    "blank.toml": b"  \n",
    "binary.json": b"\xff\xfe{}",
    "image.toml": b"\x89PNG\r\n\x1a\n\x00\x00",
    "broken.json": b'{"format": ',
    "list.json": b"[1, 2]",
    "other.json": b'{"format": "farpipe/timeline/1"}',
    "nameless.json": b'{"num_microbatches": 4}',
    "newer.json": b'{"format": "farpipe/problem/9"}',
    "broken.toml": b"[model\n",
    "unknown.toml": b"[modle]\n",
}


@pytest.fixture
def folder(tmp_path, problem_file):
    """A folder with every kind of wrong file."""
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.toml").mkdir()
    return tmp_path


def expect_error(run, code, *messages):
    """One message for people and an exit code for scripts; nothing on stdout that a script could take for an answer."""
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""
    for message in messages:
        assert message in run.stderr


WRONG_STEPS = [
    ("empty.json", "empty.json: the file is empty"),
    ("blank.toml", "blank.toml: the file is empty"),
    ("binary.json", "binary.json: not UTF-8"),
    ("image.toml", "image.toml: not UTF-8"),
    ("broken.json", "broken.json: not JSON"),
    ("list.json", "list.json: expected a job (.toml), a plan or a problem"),
    ("other.json", "found format 'farpipe/timeline/1'"),
    ("nameless.json", "nameless.json: expected a job (.toml), a plan or a problem"),
    ("newer.json", "farpipe/problem/1"),
    ("broken.toml", "broken.toml: not TOML"),
    ("unknown.toml", "unknown.toml: modle: unknown key; did you mean 'model'?"),
    ("folder", "folder: can't be read: Is a directory"),
    ("folder.toml", "folder.toml: can't be read: Is a directory"),
    ("absent.json", "absent.json: can't be read: No such file or directory"),
    ("/dev/null", "/dev/null: not a plain file"),
]


@pytest.mark.parametrize(("name", "message"), WRONG_STEPS, ids=[name for name, _ in WRONG_STEPS])
def test_files_of_a_wrong_kind_are_named(farpipe, folder, name, message):
    expect_error(farpipe("compare", name), 3, message)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["schedule"], ["--json"]),
        (["simulate"], ["--json"]),
        (["plan"], ["--json"]),
        (["profile"], []),
        (["train"], ["--device", "sleep"]),
        (["report"], []),
    ],
    ids=lambda words: " ".join(words),
)
@pytest.mark.parametrize("name", ["empty.json", "list.json", "folder", "absent.json"])
def test_every_command_that_reads_a_file_names_a_wrong_one(farpipe, folder, command, option, name):
    expect_error(farpipe(*command, name, *option), 3, f"farpipe: {name}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "problem.json", "--method", "1f1"], "there is no schedule '1f1'; did you mean '1f1b'?"),
        (["compare", "problem.json", "--method", "gredy"], "did you mean 'greedy'?"),
        (["schedule", "problem.json", "--method", "wawe"], "did you mean 'wave'?"),
        (["compare", "problem.json", "--time-limit", "-1"], "--time-limit"),
        (["compare", "problem.json", "--time-limit", "soon"], "--time-limit"),
        (["schedule", "problem.json", "--time-limit", "-1"], "--time-limit"),
        (["compare", "problem.json", "--colour"], "No such option"),
        (["profile", str(JOB), "--processes", "0"], "--processes"),
        (["profile", str(JOB), "--as", "a10"], "--as: the job has no device 'a10'"),
        (["train", str(JOB), "--steps", "0"], "--steps"),
        (["report"], "Missing argument"),
        (["schedule", "problem.json", "--method", "1f1b", "--time-limit", "10"], "--time-limit is for a search, and"),
        (["schedule", "problem.json", "--timeline"], "--timeline needs --json"),
        (["train", str(JOB), "--device", "sleep", "--resume", "."], "--resume has nothing to continue: a rehearsal"),
        (["train", str(JOB), "--allow-plaintext"], "--allow-plaintext needs --wan"),
        (["export", "problem.json", "--dtype", "bfloat16"], "--dtype needs --format hugging-face"),
        (
            ["compare", "problem.json", "--method", "1f1b", "--time-limit", "5"],
            "with one of greedy, local, exact, auto",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_that_a_command_does_not_know_are_named(farpipe, folder, arguments, message):
    expect_error(farpipe(*arguments), 2, message)


def test_a_search_for_an_order_that_the_job_names_is_refused(farpipe, tmp_path):
    (tmp_path / "job.toml").write_text(JOB.read_text() + '\n[schedule]\nmethod = "1f1b"\n')
    expect_error(
        farpipe("plan", "job.toml", "--time-limit", "5"), 2, "job.toml names the schedule '1f1b'", 'method = "auto"'
    )


def test_words_that_look_like_markup_are_shown_as_they_are(farpipe, tmp_path):
    name = "[/b] :bug: [red]x"
    (tmp_path / "job.toml").write_text(job([site("here", num_devices=1)]).to_toml().replace('"small"', f'"{name}"'))
    run = farpipe("plan", "job.toml")
    assert run.returncode == 0
    assert run.stdout.startswith(f"{name}: use here.")


STEERING = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"
"""Sets a terminal's title, clears it, goes back, colours and turns what follows."""


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_names_and_files_do_not_steer_the_terminal(farpipe, tmp_path, monkeypatch, terminal):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    escaped = json.dumps(STEERING)[1:-1].replace("\\u001b", "\\u001B")
    text = job([site("here", num_devices=1)]).to_toml().replace('"small"', f'"small{escaped}"')
    (tmp_path / "job.toml").write_text(text)
    (tmp_path / f"job{STEERING}.toml").write_text("[modle]\n")
    (tmp_path / "fleet.csv").write_text(f"job{STEERING},2\n")
    for words in (
        ["plan", "job.toml"],
        ["simulate", "plan.json"],
        ["compare", "plan.json", "--method", "1f1b"],
        ["plan", f"job{STEERING}.toml"],
        ["plan", "job.toml", "--method", STEERING],
        ["lengths", "fleet.csv", STEERING],
        ["import", "fleet.csv"],
        ["report", STEERING],
        [STEERING],
    ):
        run = farpipe(*words)
        shown = run.stdout + run.stderr
        colours = re.sub(r"\x1b\[[0-9;]*m", "", shown) if terminal else shown
        assert not set(STEERING[:1] + "\x07\r\x9b\u202e") & set(colours), (words, shown)
        assert "bug in farpipe" not in shown


FAR = "x" * 300
PATHS = {
    "too long": FAR,
    "through a file": "file/x",
    "in a circle": "circle/x",
    "a circle": "circle",
    "a folder": "folder",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "job.toml", "-o", "PATH"],
        ["plan", "PATH"],
        ["train", "job.toml", "--device", "sleep", "--run-dir", "PATH/run", "--resume", "PATH"],
        ["prepare", "job.toml", "--run-dir", "PATH/PATH"],
        ["certs", "init", "PATH/pki"],
        ["export", "PATH"],
        ["report", "PATH"],
        ["lengths", "PATH"],
        ["import", "PATH"],
        ["optical", "blocking", "--network", "PATH"],
        ["fleet", "simulate", "PATH", "--jobs", "PATH"],
    ],
    ids=" ".join,
)
def test_a_path_that_can_not_be_is_named_and_no_bug_of_ours(farpipe, folder, words, path):
    (folder / "file").write_text("x")
    (folder / "circle").symlink_to("circle")
    (folder / "job.toml").write_text(job([site("here", num_devices=1)]).to_toml())
    run = farpipe(*(word.replace("PATH", path) for word in words))
    assert run.returncode in (0, 2, 3, 6), run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr) < 2_000


def test_a_profile_comes_too_late_for_a_plan(farpipe, tmp_path):
    planning.plan(job([site("here", num_devices=1)])).save(tmp_path / "plan.json")
    expect_error(farpipe("train", "plan.json", "--profile", "any.json"), 2, "--profile: plan.json is a finished plan")


def test_a_schedule_for_another_problem_shows_the_place(farpipe, problem_file, tmp_path):
    assert farpipe("schedule", problem_file, "--method", "1f1b", "-o", "s.json").returncode == 0
    data = json.loads((tmp_path / "s.json").read_text())
    data["ranks"][0].append("2F0")
    (tmp_path / "s.json").write_text(json.dumps(data))
    expect_error(farpipe("simulate", problem_file, "--schedule", "s.json"), 3, "2F0")


@pytest.mark.parametrize("arguments", [("export", "folder"), ("report", "folder")], ids=" ".join)
def test_a_folder_without_a_run_is_told(farpipe, folder, arguments):
    expect_error(farpipe(*arguments), 3, "folder: not a run directory: it has no plan.json; `farpipe train` makes one")


def test_an_order_that_nobody_knows_is_told_with_the_file(farpipe, tmp_path):
    (tmp_path / "job.toml").write_text(JOB.read_text() + '\n[schedule]\nmethod = "1f1"\n')
    message = "farpipe: job.toml: schedule.method: there is no schedule '1f1'; did you mean '1f1b'?"
    for command in (["plan"], ["compare"], ["train", "--device", "sleep"]):
        expect_error(farpipe(*command, "job.toml"), 3, message)


@pytest.fixture
def without_rights(tmp_path):
    """`farpipe` without the right to read what it may not, which root has otherwise."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if drop and shutil.which(drop[0]) is None:
        pytest.skip("root can read everything, and setpriv is not there to take the right away")

    def run(*arguments):
        command = [*drop, sys.executable, "-m", "farpipe", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.mark.slow
def test_a_file_that_may_not_be_read_is_named(without_rights, problem_file):
    problem_file.chmod(0)
    reason = "problem.json: can't be read: Permission denied"
    expect_error(without_rights("schedule", "problem.json"), 3, f"farpipe: {reason}")
    expect_error(without_rights("simulate", JOB, "--schedule", "problem.json"), 3, f"farpipe: {reason}")


@pytest.mark.slow
def test_a_folder_that_may_not_be_entered_is_named(without_rights, problem_file, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    try:
        expect_error(without_rights("train", JOB, "--run-dir", "closed/run"), 6, "farpipe: closed/run/", "no access")
        expect_error(without_rights("certs", "init", "closed/pki"), 6, "farpipe: closed/pki/authority.key: no access")
        run = without_rights("schedule", "problem.json", "--method", "1f1b", "-o", "closed/s.json")
        expect_error(run, 6, "farpipe: closed/s.json: can't be written: Permission denied")
    finally:
        closed.chmod(0o700)


def test_a_point_outside_tolerance_is_told_with_its_figures_once(farpipe, tmp_path):
    columns = "group,model,num_layers,hidden,num_heads,global_batch,microbatch_size,tensor,data,pipeline,step_s"
    (tmp_path / "points.csv").write_text(f"{columns}\nvtrain-multi-node,mine,24,2048,16,64,2,2,4,4,1.0\n")
    run = farpipe("validate", "points.csv")
    assert run.returncode == 5
    assert run.stdout.count("mean error") == 1
    assert (
        run.stderr.splitlines()[-1] == "farpipe: outside tolerance: vtrain-multi-node"
    )  # a slow machine shows progress


@pytest.mark.slow
def test_points_of_a_wrong_kind_are_named(farpipe, folder):
    for name in ("broken.toml", "folder", "absent.csv"):
        expect_error(farpipe("validate", name), 3, f"farpipe: {name}")


OUTPUTS = [
    ["schedule", "problem.json", "--method", "1f1b", "-o"],
    ["compare", "problem.json", "--method", "1f1b", "--plot"],
    ["simulate", "problem.json", "--schedule", "s.json", "--perfetto"],
    ["simulate", "problem.json", "--schedule", "s.json", "--plot"],
    ["simulate", "problem.json", "--schedule", "s.json", "--html"],
]


@pytest.fixture
def schedule_file(farpipe, problem_file):
    """An order that can be simulated."""
    assert farpipe("schedule", problem_file, "--method", "1f1b", "-o", "s.json").returncode == 0


@pytest.mark.parametrize("arguments", OUTPUTS, ids=lambda words: f"{words[0]} {words[-1]}")
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("folder", "Is a directory"),
        ("empty.json/x", "empty.json is not a directory"),
        ("/dev/full", "No space left on device"),
    ],
    ids=["a folder", "below a file", "a full device"],
)
def test_an_output_that_can_not_be_written_is_named(farpipe, folder, schedule_file, arguments, target, reason):
    expect_error(farpipe(*arguments, target), 6, f"{target}: can't be written: {reason}")


@pytest.mark.parametrize("arguments", OUTPUTS[1:], ids=lambda words: f"{words[0]} {words[-1]}")
def test_an_output_never_takes_the_place_of_an_input(farpipe, tmp_path, schedule_file, arguments):
    before = (tmp_path / "problem.json").read_bytes()
    (tmp_path / "same").hardlink_to(tmp_path / "problem.json")
    expect_error(farpipe(*arguments, "same"), 3, "same: this command reads it; write to another file")
    assert (tmp_path / "problem.json").read_bytes() == before


def test_a_picture_has_the_format_of_its_name(farpipe, schedule_file):
    run = farpipe("simulate", "problem.json", "--schedule", "s.json", "--plot", "g.png")
    expect_error(run, 2, "--plot g.png: pictures are written as .svg")


@pytest.fixture
def full_disk(tmp_path):
    """A file system of its own with 64 KiB, of which most is taken."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mount.stderr.strip()}")
    try:
        (place / "most").write_bytes(b"x" * (56 << 10))
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_half_an_authority_is_not_left_on_a_full_disk(farpipe, full_disk):
    (full_disk / "more").write_bytes(b"x" * (4 << 10))
    expect_error(
        farpipe("certs", "init", full_disk / "pki"), 6, "authority.pem: can't be written: No space left on device"
    )
    assert list((full_disk / "pki").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["new.json", "old.json"])
def test_a_disk_that_fills_up_leaves_what_stood_there(farpipe_process, problem_file, full_disk, name):
    (full_disk / "old.json").write_text(old := '{"format": "farpipe/schedule/1"}')
    data = json.loads(problem_file.read_text()) | {"num_microbatches": 2000}
    data["ranks"] = [{"memory_bytes": None, "static_bytes": 0}] * 2
    problem_file.write_text(json.dumps(data))
    run = farpipe_process("schedule", problem_file, "--method", "1f1b", "-o", full_disk / name)
    expect_error(run, 6, f"{name}: can't be written: No space left on device")
    assert {path.name for path in full_disk.iterdir()} <= {"most", "old.json", "old.previous.json"}
    assert (full_disk / "old.json").read_text() == old


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_a_closed_output_stops_nothing(problem_file, tmp_path, closed):
    command = f'exec "$0" -m farpipe schedule "$1" --method 1f1b -o order.json {closed}'
    subprocess.run(["sh", "-c", command, sys.executable, problem_file], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "order.json").exists()


def test_a_file_that_is_no_schedule_is_not_replaced_by_one(farpipe, problem_file, tmp_path):
    (tmp_path / "notes.json").write_text("mine")
    expect_error(
        farpipe("schedule", problem_file, "--method", "1f1b", "-o", "notes.json"), 3, "notes.json: exists and is not"
    )
    assert (tmp_path / "notes.json").read_text() == "mine"


TAKEN = [
    ("simulate", "problem.json", "--html", "mine.html"),
    ("simulate", "problem.json", "--perfetto", "mine.json"),
    ("simulate", "problem.json", "--plot", "mine.svg"),
    ("compare", "problem.json", "--plot", "mine.svg"),
    ("plan", "job.toml", "--html", "mine.html"),
    ("plan", "job.toml", "--output", "mine.json"),
    ("profile", "job.toml", "--output", "mine.json"),
    ("report", "runs/last", "--output", "mine.html"),
    ("report", "runs/last", "--perfetto", "mine.json"),
    ("sweep", "job.toml", "--over", "link.latency_s=1,2", "--output", "mine.jsonl"),
    ("sweep", "job.toml", "--over", "link.latency_s=1,2", "--plot", "mine.png"),
    ("fleet", "simulate", "fleet.toml", "--jobs", "jobs.csv", "--events", "mine.jsonl"),
    ("fleet", "simulate", "fleet.toml", "--jobs", "jobs.csv", "--plot", "mine.png"),
    ("fleet", "compare", "fleet.toml", "--jobs", "jobs.csv", "--plot", "mine.svg"),
    ("sequences", "plan", "job.toml", "--html", "mine.html"),
    ("optical", "blocking", "--network", "n.csv", "--trace", "t.csv", "--paths", "p.csv", "--events", "mine.csv"),
    ("optical", "simulate", "job.toml", "--network", "n.csv", "--html", "mine.html"),
    ("check", "job.toml", "--log", "log.txt", "--html", "mine.html"),
]
"""Options that write a file; what the commands read need not be there: it is not read before."""
FOREIGN = {
    "html": b"<html>mine</html>",
    "json": b'{"traceEvents": [], "schemaVersion": 1}',
    "jsonl": b'{"mine": 1}\n',
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg">mine</svg>',
    "png": b"\x89PNG\r\n\x1a\n mine, drawn by Matplotlib",
    "csv": b"request,mine\n",
}


@pytest.mark.parametrize("words", TAKEN, ids=lambda words: " ".join(word for word in words if "." not in word))
def test_a_file_that_farpipe_has_not_written_is_not_replaced(words, farpipe, tmp_path):
    content = FOREIGN[words[-1].partition(".")[2]]
    (tmp_path / words[-1]).write_bytes(content)
    expect_error(farpipe(*words), 3, f"{words[-1]}: exists and is not ")
    assert (tmp_path / words[-1]).read_bytes() == content


def test_results_of_farpipe_are_replaced(farpipe, problem_file):
    for _ in range(2):
        for words in (
            ("schedule", problem_file, "--method", "1f1b", "-o", "order.json"),
            ("simulate", problem_file, "--schedule", "order.json", "--html", "page.html", "--perfetto", "trace.json"),
            ("compare", problem_file, "--method", "gpipe", "--method", "1f1b", "--plot", "picture.svg"),
            ("export", "order.json", "-o", "order.csv"),
        ):
            done = farpipe(*words)
            assert done.returncode == 0, done.stderr


def test_settings_that_somebody_has_edited_are_not_replaced_by_an_export(farpipe, problem_file, tmp_path):
    assert farpipe("schedule", problem_file, "--method", "1f1b", "-o", "order.json").returncode == 0
    (tmp_path / "mine.yaml").write_text("mine: 1\n")
    expect_error(farpipe("export", "order.json", "-o", "mine.yaml"), 3, "mine.yaml: exists and is not a farpipe result")


def piped(command, reader, folder):
    """Exit code of `farpipe COMMAND | READER`, farpipe's, and what it wrote to stderr."""
    line = f"{sys.executable} -m farpipe {command} | {reader}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=folder, check=False, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "reader"),
    [
        ("compare problem.json", "head -1"),
        ("compare problem.json --json", "true"),
        ("schedule problem.json --method 1f1b", "head -c 1"),
        ("--help", "head -1"),
        ("--help", "head -c 1"),
        ("--help", "true"),
    ],
)
def test_a_reader_that_leaves_early_is_no_error(problem_file, command, reader):
    run = piped(command, reader, problem_file.parent)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.slow
def test_a_reader_that_leaves_in_the_middle_of_a_long_answer_is_no_error(problem_file):
    data = json.loads(problem_file.read_text()) | {"num_microbatches": 2000}
    data["ranks"] = [{"memory_bytes": None, "static_bytes": 0}] * 2
    problem_file.write_text(json.dumps(data))
    for option in ("--json --timeline", ""):
        run = piped(f"schedule problem.json --method 1f1b {option}", "head -c 1", problem_file.parent)
        assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare problem.json", "schedule problem.json --method 1f1b --json", "--help"])
def test_an_answer_to_a_full_disk_is_an_error(problem_file, command):
    line = f"{sys.executable} -m farpipe {command} > /dev/full"
    run = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, cwd=problem_file.parent, check=False, timeout=120
    )
    assert run.returncode == 6
    assert run.stderr == "farpipe: standard output: can't be written: No space left on device\n"
