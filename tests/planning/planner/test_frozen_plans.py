"""Plans of forty jobs as they were, so that a simpler planner is known to give the same answers.

The figures are in frozen_plans.json. Where an answer became better, or the cost model another one on purpose, write
them anew and look at what has changed:

    python tests/planning/planner/test_frozen_plans.py
"""

import itertools
import json
import sys
import time
from pathlib import Path

import pytest

from farpipe import planning
from farpipe.core.errors import FarpipeError, InfeasibleError
from farpipe.core.spec import load_job

HERE = Path(__file__).parent
FROZEN = HERE / "frozen_plans.json"
RECIPES = HERE.parents[2] / "recipes"
TOLERANCE = 0.005
"""Relative difference of a step; a search may find a better order, and with less of the CPU a worse one."""
BETTER = 0.001
"""Relative gain of a step from which a plan may have another layout than it had."""

DEGREES = ("pipeline", "data", "tensor", "context", "expert", "virtual", "microbatch_size")


def text(model, training, sites, links=(), layout="", extra=""):
    """A job: sites as (name, device, number of devices), links as (one, other, latency, bandwidth)."""
    sites = [f'[[cluster.sites]]\nname = "{n}"\ndevice = "{d}"\nnum_devices = {count}\n' for n, d, count in sites]
    links = [
        f'[[cluster.links]]\nbetween = ["{a}", "{b}"]\nlatency = "{latency}"\nbandwidth = "{rate}"\n'
        for a, b, latency, rate in links
    ]
    parts = [f'[model]\npreset = "{model}"\n', f"[training]\n{training}\n", f"[layout]\n{layout}\n", extra]
    return "\n".join([*parts, *sites, *links])


def tokens(sequence_length, global_batch, **further):
    """The training's keys."""
    keys = {"sequence_length": sequence_length, "global_batch": global_batch} | further
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())


def pair(device, count, other=None, latency="20 ms", rate="100 Gbit/s"):
    """Two sites and the link between them."""
    sites = [("zurich", device, count), ("lugano", other or device, count)]
    return sites, [("zurich", "lugano", latency, rate)]


def ring(device, counts, latency="15 ms", rate="50 Gbit/s"):
    """Sites of which each has a link to the next."""
    names = [f"s{number}" for number in range(len(counts))]
    sites = [(name, device, count) for name, count in zip(names, counts, strict=True)]
    return sites, [(a, b, latency, rate) for a, b in itertools.pairwise(names)]


def one(device, count):
    """One site."""
    return [("zurich", device, count)], []


def packed(length, batch, layout="", sites=None, model="llama-3-8b"):
    """A job on chunks of the recipe's documents, each of them as often as it takes to fill the batch."""
    data = f'[data]\nsource = "{RECIPES / "long_documents.jsonl"}"\npacking = "elastic"\n'
    return text(model, tokens(length, batch), *(sites or pair("h100", 4)), layout=layout, extra=data)


def disturbed(job, **further):
    """The job with `further` keys of its last link."""
    return job + "\n".join(f"{key} = {json.dumps(value)}" for key, value in further.items()) + "\n"


LONG = tokens(4096, 256)
JOBS = {
    "8b on one machine": text("llama-3-8b", LONG, *one("h100", 8)),
    "8b on 64": text("llama-3-8b", LONG, *one("h100", 64)),
    "8b on two sites": text("llama-3-8b", LONG, *pair("h100", 8)),
    "8b far apart": text("llama-3-8b", LONG, *pair("h100", 8, latency="80 ms", rate="10 Gbit/s")),
    "8b over a thin link": text("llama-3-8b", LONG, *pair("h100", 8, rate="1 Gbit/s")),
    "8b on unequal devices": text("llama-3-8b", LONG, *pair("h100", 8, "a100-80gb")),
    "8b on three sites": text("llama-3-8b", LONG, *ring("h100", (8, 8, 8))),
    "8b on five sites": text("llama-3-8b", LONG, *ring("h100", (8, 16, 8, 4, 8))),
    "13b on a100": text("llama-2-13b", tokens(2048, 512), *pair("a100-80gb", 16)),
    "13b on 40 gb": text("llama-2-13b", tokens(2048, 256), *one("a100-40gb", 16)),
    "70b on two sites": text("llama-3-70b", tokens(8192, 256), *pair("h100", 64)),
    "70b far apart": text("llama-3-70b", tokens(8192, 256), *pair("h100", 64, latency="60 ms", rate="25 Gbit/s")),
    "70b pinned tensor": text("llama-3-70b", tokens(8192, 256), *pair("h100", 64), layout="tensor = 4"),
    "70b pinned pipeline": text("llama-3-70b", tokens(8192, 256), *pair("h100", 64), layout="pipeline = 8"),
    "70b pinned context": text("llama-3-70b", tokens(32768, 64), *pair("h100", 64), layout="context = 4"),
    "70b at 128k": text("llama-3-70b", tokens(131072, 16), *pair("h100", 64), layout="context = 8"),
    "405b on 512": text("llama-3-405b", tokens(8192, 1152), *one("h100", 512)),
    "405b on two times 512": text("llama-3-405b", tokens(8192, 1152), *pair("h100", 512)),
    "405b on h200": text("llama-3-405b", tokens(8192, 1152), *one("h200", 1024)),
    "mixtral": text("mixtral-8x7b", tokens(4096, 256), *pair("h100", 32)),
    "qwen 32b": text("qwen2.5-32b", tokens(4096, 512), *pair("h200", 32)),
    "1b on consumers' devices": text("llama-3.2-1b", tokens(2048, 64), *pair("rtx-4090", 4, rate="10 Gbit/s")),
    "mistral on three unequal sites": text(
        "mistral-7b",
        tokens(4096, 128),
        [("a", "h100", 8), ("b", "a100-80gb", 8), ("c", "a100-40gb", 8)],
        [("a", "b", "5 ms", "100 Gbit/s"), ("b", "c", "30 ms", "20 Gbit/s")],
    ),
    "a named order": text("llama-3-8b", LONG, *pair("h100", 8), extra='[schedule]\nmethod = "zb-h1"\n'),
    "zero 2": text("llama-3-8b", tokens(4096, 256, zero=2), *one("h100", 32)),
    "recomputation": text("llama-2-13b", tokens(4096, 256), *pair("a100-40gb", 8)),
    "too large": text("llama-3-405b", LONG, *pair("h100", 8)),
    "one stage, pinned": text("llama-3-70b", LONG, *one("h100", 64), layout="tensor = 1\npipeline = 1"),
    "recipe two sites": (RECIPES / "two_sites.toml").read_text(),
    "recipe three sites": (RECIPES / "three_sites_asymmetric.toml").read_text(),
    "recipe of documents": (RECIPES / "long_documents.toml")
    .read_text()
    .replace("recipes/long_documents.jsonl", str(RECIPES / "long_documents.jsonl")),
    "documents on two sites": packed(4096, 64),
    "documents in a pipeline of 8": packed(4096, 96, layout="pipeline = 8"),
    "documents under tensor parallelism": packed(8192, 48, layout="tensor = 2"),
    "documents at one site": packed(4096, 48, sites=one("a100-80gb", 8)),
    "documents over a thin link": packed(4096, 48, sites=pair("h100", 2, rate="1 Gbit/s"), model="llama-3.2-1b"),
    "loss on the link": disturbed(text("llama-3-8b", LONG, *pair("h100", 8, rate="10 Gbit/s")), loss=1e-4),
    "jitter on a link of many microbatches": disturbed(
        text("llama-3-8b", tokens(4096, 2048, microbatch_size=1), *pair("h100", 8), layout="pipeline = 4"),
        jitter="100 us",
    ),
    "adapters": text("llama-3-70b", LONG, *pair("h100", 16), extra="[training.lora]\nrank = 16\n"),
    "a batch that divides badly": text("llama-3-8b", tokens(4096, 255), *pair("h100", 8)),
}


def answer(name, folder):
    """Plan of a job as figures; of one that can't be planned its error's class."""
    path = folder / "job.toml"
    path.write_text(JOBS[name])
    begin_s = time.monotonic()
    try:
        plan = planning.plan(load_job(path))
    except InfeasibleError as error:
        return {"error": type(error).__name__, "plan_s": time.monotonic() - begin_s}
    return {
        "method": plan.schedule.method,
        "where": plan.where,
        "layout": {degree: getattr(plan.layout, degree) for degree in DEGREES},
        "step_s": plan.prediction.step_s,
        "plan_s": round(time.monotonic() - begin_s, 2),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_plan_is_as_good_as_it_was(name, tmp_path):
    frozen, now = json.loads(FROZEN.read_text())[name], answer(name, tmp_path)
    assert now.get("error") == frozen.get("error")
    if "error" not in frozen:
        assert now["step_s"] <= frozen["step_s"] * (1 + TOLERANCE)
        if now["step_s"] > frozen["step_s"] * (1 - BETTER):
            assert [now[key] for key in ("where", "layout")] == [frozen[key] for key in ("where", "layout")]


def write(folder):
    """All answers to the file."""
    found = {}
    for name in JOBS:
        try:
            found[name] = answer(name, folder)
        except FarpipeError as error:
            print(name, error, file=sys.stderr)
            raise
        print(name, found[name], file=sys.stderr)
    FROZEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp"))
