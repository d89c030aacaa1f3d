"""Small valid files of every kind that commands read, each with its command, and mutants of them by a seed."""

import gzip
import json
import random
import re
import tomllib
from pathlib import Path

import numpy as np
import tomlkit
import yaml

import optical_data
from cli.conftest import PROBLEM
from interop import test_files as settings
from interop import test_job_lists as jobs
from interop import test_link_tests as links
from interop import test_logs as logs
from interop import test_megatron as megatron
from interop import test_printed_arguments as arguments
from interop import test_sites as sites
from interop import test_torchtitan_python as titan
from interop import test_traces as traces
from optical import test_network_files as networks

RECIPES = Path(__file__).parents[1] / "recipes"
IMPORT, LOG = ("import", "{}"), ("import", "{}", "--job", "long.toml")
OF_JOB = ("import", "{}", "--job", "job.toml")
LONG_JOB = traces.JOB.replace("global_batch = 4", "global_batch = 64").replace("length = 256", "length = 4096")
PLAN = ("plan", "{}", "--no-strategies", "-o", "new.json")
BLOCKING = ("optical", "blocking", "--slots", "20")
FLEET = ("fleet", "simulate", "fleet.toml", "--jobs", "jobs.csv", "--policy", "fcfs")


def _log(form, num_steps=12):
    return "\n".join(logs.FORMS[form](step) for step in range(1, num_steps + 1)) + "\n"


def _kineto():
    events = traces.Events(False)
    events.microbatch()
    return {"schemaVersion": 1, "traceEvents": events.found}


def _head(path, num_lines):
    return "\n".join(path.read_text(encoding="utf-8").splitlines()[:num_lines]) + "\n"


FLEET_TOML = (RECIPES / "fleet" / "three_clusters.toml").read_text(encoding="utf-8")
PRICED = FLEET_TOML.replace("electricity = 95.0", 'electricity = { file = "hours.csv", column = "X" }')
TWO_SITES = (RECIPES / "two_sites.toml").read_text(encoding="utf-8")
_NO_LINKS = TWO_SITES.partition("[[cluster.links]]")[0]
MATRICES = _NO_LINKS + '\n[cluster.matrices]\nthroughput = "rates.csv"\nrtt = "rtt.csv"\n'
OF_MATRICES = ("plan", "matrices.toml", "--no-strategies", "-o", "new.json")

SAMPLES = {
    # settings
    "megatron.sh": (IMPORT, megatron.SCRIPT),
    "arguments.log": (("import", "{}", "-o", "new.toml"), arguments.printed()),
    "nemo.yaml": (IMPORT, megatron.NEMO),
    "bridge.yaml": (IMPORT, megatron.BRIDGE),
    "titan.toml": (IMPORT, settings.TITAN),
    "early.toml": (IMPORT, settings.EARLY_TITAN),
    "titan.py": (("import", "{}", "--set", "config=llama3_8b"), titan.PYTHON),
    "config.json": (("import", "{}", "ds.json", "args.yaml", "accelerate.yaml"), settings.LLAMA),
    "ds.json": (("import", "{}", "config.json", "args.yaml", "accelerate.yaml"), settings.DEEPSPEED),
    "args.yaml": (("import", "{}", "config.json", "ds.json", "accelerate.yaml"), settings.TRAINER),
    "accelerate.yaml": (("import", "{}", "config.json", "ds.json", "args.yaml"), settings.ACCELERATE),
    # links, sites
    "iperf3.json": (IMPORT, links.IPERF3),
    "udp.json": (("check", "two.toml", "--log", "megatron.log", "--links", "{}"), links.iperf3(end=links.UDP_END)),
    "stream.json": (IMPORT, links.STREAM),
    "mtr.json": (IMPORT, links.MTR),
    "ping.txt": (IMPORT, links.PING),
    "nccl.txt": (IMPORT, links.ranks("a", "b") + links.NCCL),
    "perftest.txt": (IMPORT, links.ENDS.format(1, "a", 2, "b") + links.PERFTEST),
    "latency.txt": (IMPORT, links.LATENCY),
    "qperf.txt": (IMPORT, links.QPERF_SIZES + links.QPERF_UDP),
    "nodes.txt": (IMPORT, sites.text_of([("a", sites.H100, "IDLE"), ("b", sites.A100, "IDLE")])),
    "nodes.json": (IMPORT, sites.scontrol_json([("a", sites.H100, "IDLE")])),
    "sinfo.json": (IMPORT, sites.sinfo_json([("a", sites.H100, "IDLE")])),
    "sky.yaml": (IMPORT, sites.SKY),
    # lists
    "sacct.txt": (IMPORT, jobs.SACCT),
    "sacct.json": (IMPORT, jobs.SACCT_JSON),
    "sky.json": (IMPORT, jobs.SKYPILOT),
    "kueue.json": (IMPORT, jobs.KUEUE),
    "kueue.yaml": (IMPORT, jobs.KUEUE_YAML),
    "volcano.json": (IMPORT, jobs.VOLCANO),
    "jobset.json": (IMPORT, jobs.record("JobSet", {"replicatedJobs": [jobs.replicated(2, 2)]})),
    "rayjob.json": (IMPORT, jobs.record("RayJob", {"rayClusterSpec": jobs.RAY})),
    # logs, traces
    **{f"{form.partition(' ')[0].lower()}.log": (LOG, _log(form)) for form in logs.FORMS},
    "megatron.log": (("check", "long.toml", "--log", "{}"), _log("Megatron-LM")),
    "rates.log": (LOG, "\n".join(map(logs.deepspeed_rate, range(1, 9)))),
    "dllogger.log": (LOG, "\n".join(map(logs.dllogger, range(1, 9)))),
    "wandb.csv": (LOG, logs.TABLES["wandb"] + "\n" + "".join(f"{step},2.2,2,3\n" for step in range(1, 9))),
    "trace.json": (OF_JOB, _kineto()),
    "trace.json.gz": (OF_JOB, gzip.compress(json.dumps(_kineto()).encode())),
    "schedule.csv": (IMPORT, "0F0,0F1,0I0,0W0,0B1\n1F0,1F1,1B0,1B1\n"),
    # lengths
    "lengths.txt": (("lengths", "{}"), "12\n900\n33\n"),
    "lengths.csv": (("lengths", "{}"), "length,count\n12,3\n900,2\n"),
    "lengths.jsonl": (("lengths", "{}"), '{"num_tokens": 12}\n{"num_tokens": 90}\n'),
    "texts.jsonl": (("lengths", "{}"), '{"text": "ab c"}\n{"text": "x"}\n'),
    # light
    "network.csv": ((*BLOCKING, "--network", "{}", "--load", "5", "--set", "seeds=1"), _head(optical_data.LINKS, 30)),
    "network.json": (
        (*BLOCKING, "--network", "{}", "--load", "5", "--set", "seeds=1"),
        {"nodes": [{"id": 1}, {"id": 2}, {"id": 3}], "links": [
            {"source": 1, "target": 2, "length": 9}, {"source": 2, "target": 3, "dist": 8}]},
    ),
    "own.json": (
        (*BLOCKING, "--network", "{}", "--load", "5", "--set", "seeds=1"),
        {"format": "farpipe/network/1", "name": "n", "edges": [{"a": "x", "b": "y", "km": 9, "fibres": 2}]},
    ),
    **{
        f"net{ending}": ((*BLOCKING, "--network", "{}", "--load", "5", "--set", "seeds=1"), text)
        for ending, text in {
            "1.json": networks.gnpy_json(),
            ".graphml": networks.graphml(),
            ".gml": networks.gml(),
            ".xml": networks.sndlib_xml(),
            "1.txt": networks.sndlib_native(),
            "2.txt": networks.gym_text(),
        }.items()
    },
    "modulation.csv": (
        (*BLOCKING, "--load", "5", "--set", "seeds=1", "--modulation", "{}"),
        "reach_km,bit_s_hz\n500,4\n4000,2\n",
    ),
    "requests.csv": ((*BLOCKING, "--trace", "{}"), _head(optical_data.TRACE, 40)),
    "paths.csv": ((*BLOCKING, "--trace", "requests.csv", "--paths", "{}"), _head(optical_data.BY_KM, 2000)),
    # fleets, plans
    "fleet.toml": (FLEET, FLEET_TOML),
    "jobs.csv": (FLEET, _head(RECIPES / "fleet" / "three_clusters_jobs.csv", 8)),
    "hours.csv": (
        ("fleet", "simulate", "priced.toml", "--jobs", "jobs.csv", "--policy", "fcfs"),
        "utc,X\n2024-01-01T00:00:00,90\n2024-01-01T01:00:00,95\n",
    ),
    "priced.toml": (("fleet", "simulate", "{}", "--jobs", "jobs.csv", "--policy", "fcfs"), PRICED),
    "job.toml": (PLAN, traces.JOB),
    "hugging/config.json": (("plan", "hugging.toml", "--no-strategies", "-o", "new.json"), settings.LLAMA),
    "hugging.toml": (PLAN, re.sub(r"\[model\][^[]*", '[model]\nhugging_face = "hugging"\n', traces.JOB)),
    "rates.csv": (OF_MATRICES, "src_region,dst_region,throughput_gbit_s\nzurich,lugano,5\nlugano,zurich,4\n"),
    "rtt.csv": (OF_MATRICES, "src_region,dst_region,avg_rtt_ms\nzurich,lugano,20\n"),
    "matrices.toml": (PLAN, MATRICES),
    "long.toml": (PLAN, LONG_JOB),
    "two.toml": (PLAN, TWO_SITES),
    "problem.json": (("schedule", "{}", "--method", "1f1b"), PROBLEM),
    "points.toml": (
        ("validate", "{}"),
        'format = "farpipe/points/1"\n[[group]]\nname = "mine"\ntolerance = 0.5\nsource = "mine"\n[group.common]\n'
        'device = "h100-sxm"\ntensor = 1\npipeline = 1\nvocab_size = 512\n[[group.points]]\nmodel = "small"\n'
        "num_layers = 4\nhidden = 512\nnum_heads = 4\nsequence_length = 512\nglobal_batch = 16\ndata = 2\n"
        "microbatch_size = 1\nrecompute = \"full\"\nstep_s = 2.0\n",
    ),
}  # fmt: skip
SAMPLES["plan.json"] = (("simulate", "{}"), None)
SAMPLES["schedule.json"] = (("simulate", "problem.json", "--schedule", "{}"), None)
SAMPLES["lengths.npy"] = (("lengths", "{}"), None)
SAMPLES["tokens.npy"] = (("lengths", "{}"), None)
SAMPLES["tokens.ends.npy"] = (("lengths", "{}"), None)
SAMPLES["profile.json"] = (("plan", "job.toml", "--no-strategies", "--profile", "{}", "-o", "new.json"), None)
"""Made by commands; see `write_samples`."""

WEIRD = (
    *(
        None,
        True,
        "",
        "x",
        "nan",
        "-1",
        -1,
        0,
        0.5,
        1e308,
        1 << 70,
        -(1 << 63),
        "9" * 400,
        "1e999",
        [],
        {},
        [[]],
        {"a": 1},
    ),
    *([None], "\x00", "\u2028", "2024-13-45", "1/0", "${A}", "[1,", [1, "a", None], 10**30, "0x10", "-inf", 1e-320),
)


def write_samples(folder, call):
    """Write all samples into `folder`; `call` runs a command there."""
    for name, (_, content) in SAMPLES.items():
        if content is not None:
            data = content if isinstance(content, bytes) else text_of(content).encode()
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
    np.save(folder / "lengths.npy", np.array([400, 20, 3000]))
    np.save(folder / "tokens.npy", np.arange(100, dtype=np.uint16))
    np.save(folder / "tokens.ends.npy", np.array([40, 90, 100]))
    call("plan", "job.toml", "--no-strategies", "-o", "plan.json")
    call("schedule", "problem.json", "--method", "1f1b", "-o", "schedule.json")
    call("import", "trace.json", "--job", "job.toml", "-o", "profile.json")


def text_of(content):
    return content if isinstance(content, str) else json.dumps(content, indent=1)


def mutant(name, data, seed):
    """The file with one to three changes: of its values where it is JSON, YAML or TOML, else of its text or bytes."""
    rng = random.Random(f"{name} {seed}")
    kind = Path(name).suffix
    for _ in range(rng.randint(1, 3)):
        how = rng.choice((_of_values, _of_values, _of_values, _of_text, _of_bytes))
        data = how(data, kind, rng)
    return data


def _of_values(data, kind, rng):
    loads, dumps = {
        ".json": (json.loads, json.dumps),
        ".yaml": (lambda text: [*yaml.safe_load_all(text)], yaml.safe_dump_all),
        ".toml": (tomllib.loads, tomlkit.dumps),
    }.get(kind, (None, None))
    try:
        tree = [loads(data.decode())]
        _change(tree, rng)
        return dumps(tree[0]).encode("utf-8", "replace")
    except Exception:
        return _of_text(data, kind, rng)


def _change(tree, rng):
    """Change one value anywhere in a tree of lists and tables."""
    places, left = [], [tree]
    while left:
        box = left.pop()
        for key in list(box) if isinstance(box, dict) else range(len(box)):
            places.append((box, key))
            if isinstance(box[key], dict | list):
                left.append(box[key])
    box, key = rng.choice(places[1:] or places)
    match rng.randint(0, 5):
        case 0 if len(places) > 1:
            del box[key]
        case 1:
            box[key] = [box[key]]
        case 2:
            box[key] = {"a": box[key]}
        case 3:
            other, there = rng.choice(places)
            box[key] = json.loads(json.dumps(other[there], default=str))
        case _:
            box[key] = rng.choice(WEIRD)


def _of_text(data, kind, rng):
    text = data.decode("utf-8", "replace")
    lines = text.splitlines(keepends=True) or [""]
    at = rng.randrange(len(lines))
    match rng.randint(0, 6):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, rng.choice(lines))
        case 2:
            lines[at] = lines[at][: rng.randint(0, len(lines[at]))]
        case 3:
            lines = lines[: at + 1]
        case 4:
            lines.insert(at, str(rng.choice(WEIRD)) + "\n")
        case _:
            words = [*re.finditer(r"[\w.+-]+", text)]
            if words:
                word = rng.choice(words)
                lines = [text[: word.start()], str(rng.choice(WEIRD)), text[word.end() :]]
    return "".join(lines).encode("utf-8", "replace")


def _of_bytes(data, kind, rng):
    found = bytearray(data or b" ")
    for _ in range(rng.randint(1, 4)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found[: rng.randint(1, len(found))] if rng.random() < 0.2 else found)
