"""What commands print with --json on small inputs is frozen. `python tests/test_frozen_output.py` rewrites the data."""

import hashlib
import io
import itertools
import json
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

pytestmark = pytest.mark.slow
FROZEN = Path(__file__).with_name("frozen_output.json")
MEASURED = {"elapsed_s", "search_s", "planning_s"}
METHODS = ("gpipe", "1f1b", "zb-h1", "eager", "interleaved", "wave")


def problem(stage_ranks, latency_s):
    """Two ranks over two links, with one or two stages per rank."""
    message = [{"link": "a>b", "bytes": 1}, {"link": "b>a", "bytes": 1}]
    work = {"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1, "activation_bytes": 1}
    hops = [
        {"forward": message[here], "backward": message[there]} if here != there else None
        for here, there in itertools.pairwise(stage_ranks)
    ]
    links = {name: {"latency_s": latency_s, "bandwidth_bytes_per_s": 1} for name in ("a>b", "b>a")}
    return {
        "format": "farpipe/problem/1", "num_microbatches": 4, "links": links, "hops": hops,
        "ranks": [{"memory_bytes": 16, "static_bytes": 0}] * 2,
        "stages": [{"rank": rank, **work} for rank in stage_ranks],
    }  # fmt: skip


SHAPES = {"one": (0, 1), "round": (0, 1, 0, 1), "v": (0, 1, 1, 0)}
PROBLEMS = {f"{shape}{delay}.json": problem(ranks, delay) for shape, ranks in SHAPES.items() for delay in (0, 1, 2, 5)}
COMMANDS = [
    *(f"schedule {name} --method {method} --json" for name in PROBLEMS for method in METHODS),
    *(f"compare {name} --json" for name in ("one2.json", "v2.json")),
    *(f"list {kind} --json" for kind in ("models", "devices", "links")),
    "plan recipes/two_sites.toml --json",
    "simulate plan.json --json",
    "compare plan.json --json",
    "schedule recipes/three_sites_asymmetric.toml --method 1f1b --json",
    "pareto recipes/two_sites.toml --objective time,energy --json",
    "plan recipes/long_documents.toml --json -o documents.json",
    "simulate documents.json --json",
    "sequences plan recipes/long_documents.toml --json",
    "lengths --job recipes/long_documents.toml --json",
    "import recipes/megatron/train.sh --site h100 -o job.toml --json",
    "import recipes/megatron/train.log --json",
    "import recipes/megatron/ping.txt recipes/megatron/iperf.json job.toml --second-site 32 -o two.toml --json",
    "check job.toml --log recipes/megatron/train.log --json",
    "plan two.toml --no-strategies --json -o two.json",
    "export two.json --format torch-csv",
    "optical blocking --network nsfnet --load 250 --set seeds=1 --json",
    "fleet simulate recipes/fleet/bace_pipe.toml --jobs recipes/fleet/bace_pipe_jobs.csv --policy bace --json",
    "fleet compare recipes/fleet/bace_pipe.toml --jobs recipes/fleet/bace_pipe_jobs.csv --policy fcfs,farpipe --json",
    "validate --json",
]
RECIPES = FROZEN.parents[1] / "recipes"


def short(value):
    """Measured seconds masked; a long list as the digest of its JSON with 9 significant digits."""
    if isinstance(value, dict):
        return {key: "measured" if key in MEASURED else short(inner) for key, inner in value.items()}
    if isinstance(value, list):
        text = json.dumps(rounded(value))
        return [short(inner) for inner in value] if len(text) < 60 else hashlib.sha256(text.encode()).hexdigest()[:16]
    return value


def rounded(value):
    if isinstance(value, dict):
        return {key: "measured" if key in MEASURED else rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def printed(command):
    from farpipe.cli import main

    out, err = io.StringIO(), io.StringIO()
    arguments = patch.object(sys, "argv", ["farpipe", *command.split()])
    with arguments, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main()
    text = out.getvalue()
    output = json.loads(text) if text.startswith(("{", "[")) else text.splitlines()
    return {"exit": end.value.code or 0, "output": short(output)}


def expect(frozen, found, where):
    if isinstance(frozen, dict) and isinstance(found, dict):
        assert list(found) == list(frozen), f"{where}: keys"
        for key in frozen:
            expect(frozen[key], found[key], f"{where}.{key}")
    elif isinstance(frozen, float):
        assert found == pytest.approx(frozen, rel=1e-9), where
    else:
        assert found == frozen, where


def all_printed():
    with TemporaryDirectory() as folder, chdir(folder):
        for name, data in PROBLEMS.items():
            Path(name).write_text(json.dumps(data))
        Path("recipes").symlink_to(RECIPES)
        return {command: printed(command) for command in COMMANDS}


@pytest.fixture(scope="module")
def found():
    return all_printed()


@pytest.mark.parametrize("command", COMMANDS)
def test_command_prints_what_is_frozen(command, found):
    expect(json.loads(FROZEN.read_text())[command], found[command], command)


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(all_printed(), indent=0) + "\n")
