"""Every door of the planner on one job, in this process: what it plans, or how it refuses. Prints JSON.

`python doors.py JOB FOLDER [no-torch]`: with the last one torch can't be imported.
"""

import contextlib
import hashlib
import io
import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class NoTorch(MetaPathFinder):
    """Finds no PyTorch, as where it is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def command(*words):
    """(exit code, stdout, stderr) of a command."""
    from farpipe.cli import main

    written, old = (io.StringIO(), io.StringIO()), sys.argv
    sys.argv = ["farpipe", *map(str, words)]
    with contextlib.redirect_stdout(written[0]), contextlib.redirect_stderr(written[1]):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            sys.argv = old
    return code, *(text.getvalue() for text in written)


def digest(text):
    return hashlib.sha256(text.strip().encode()).hexdigest()


def planned(path, folder):
    """Digest of the plan, or what is predicted, by door."""
    from farpipe import planning
    from farpipe.core.errors import FarpipeError
    from farpipe.core.schedule.bounds import lower_bound_s
    from farpipe.core.simulate import simulate
    from farpipe.core.spec import load_job
    from farpipe.planning.explain import explained
    from farpipe.planning.planner.engine import within_engine
    from farpipe.planning.planner.orders import find_order

    job, asked = load_job(path), str(path)
    plan = planning.plan(job)
    of_request = planning.plan(job.request.on(job.cluster))
    own = {"text": job.text, "metrics": job.metrics}  # which a request has not
    of_request = of_request.model_copy(update={"job": of_request.job.model_copy(update=own)})
    found = {"planning.plan": digest(plan.to_json()), "of a request": digest(of_request.to_json())}
    found["explained"] = digest(explained(planning.find(job)[0]).to_json())
    code, _, errors = command("plan", asked, "-o", folder / "plan.json", "--no-strategies")
    found["plan"] = digest((folder / "plan.json").read_text()) if not code else errors
    found["the file's plan"] = digest(planning.Plan.load(folder / "plan.json").to_json()) if not code else errors
    runnable, pins = (job, "") if job.data.packing is not None else within_engine(job)
    code, _, errors = command("prepare", asked, "--run-dir", folder / "run", "--device", "sleep")
    found["prepare"] = digest((folder / "run" / "plan.json").read_text()) if not code else errors.splitlines()[-1]
    found["prepare says"] = pins in errors
    try:
        found["within the engine"] = digest(explained(planning.find(runnable)[0]).to_json())
    except FarpipeError as error:
        found["within the engine"] = f"farpipe: {error}".splitlines()[-1]
    bound_s, makespan_s = lower_bound_s(plan.problem), simulate(plan.problem, plan.schedule).makespan_s
    found |= {"makespan_s": makespan_s, "step_s": plan.prediction.step_s}
    try:
        find_order(plan.problem, "gpipe")
        found["gpipe"] = bound_s
    except FarpipeError as error:
        found["gpipe"] = str(error).splitlines()[0].partition("'gpipe' ")[2]
    asks = {
        "simulate": (("simulate", asked, "--json"), "makespan_s"),
        "schedule": (("schedule", asked, "--method", "gpipe", "--json"), "lower_bound_s"),
        "compare": (("compare", asked, "--method", "gpipe", "--json"), "lower_bound_s"),
        "check": (("check", asked, "--log", log_of(job, folder), "--json", "--tolerance", "9"), "predicted_step_s"),
    }
    for door, (words, key) in asks.items():
        code, text, errors = command(*words)
        found[door] = json.loads(text)[key] if not code else errors
    over = ("--over", f"training.num_steps={job.training.num_steps}", "-o", folder / "sweep.jsonl", "--json")
    for door, words in {"sweep": ("sweep", asked, *over), "pareto": ("pareto", asked, "--json")}.items():
        code, _, errors = command(*words)
        found[door] = [code, errors if code else ""]
    try:
        found["quote"] = planning.quote(job).step_s
    except FarpipeError as error:
        found["quote"] = str(error)
    return found


def log_of(job, folder):
    """A log of Megatron-LM of this job."""
    line = " iteration {0:8d}/ 100 | elapsed time per iteration (ms): 950.0 | global batch size: {1:5d} | loss: 5\n"
    path = folder / "train.log"
    path.write_text("".join(line.format(step, job.training.global_batch) for step in range(1, 14)))
    return path


if __name__ == "__main__":
    if sys.argv[3:] == ["no-torch"]:
        sys.meta_path.insert(0, NoTorch())
    print(json.dumps(planned(Path(sys.argv[1]), Path(sys.argv[2]))))
