"""The twelve checks of farpipe on GPUs, each with a figure and whether it is as it should be."""

import signal
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from benchmarks.gpu.backend import backend
from benchmarks.gpu.kernels import added_product, rounded_bytes, rounding_ms
from benchmarks.gpu.machine import Machine, Run, largest_difference, ranks_of

NUM_STEPS: Final = 5
NEEDS_TWO: Final = "needs 2 GPUs"
STOPPED_S: Final = 20.0
STOPPED_STEPS: Final = 60


class Outcome(NamedTuple):
    """What a check has found; `is_good` None: it could not be done here."""

    figure: str
    is_good: bool | None


class Check(NamedTuple):
    """One line of the table."""

    number: int
    what: str
    expected: str
    do: Callable[["Bench"], Outcome]


class Bench:
    """A machine, and runs on it that several checks look at."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.run = cache(self._run)

    def _run(self, name: str, method: str = "1f1b", device: str = "", num_ranks: int = 0) -> Run:
        """NUM_STEPS steps in fp32 of a pipeline through all ranks."""
        machine = self.machine
        job = machine.job(name, machine.tables(num_ranks or machine.num_ranks, method=method))
        return expect_success(machine.train(job, name, "--steps", NUM_STEPS, device=device))

    def trained(self, name: str, tables: str, *options: object, num_steps: int = NUM_STEPS, **training: Any) -> Run:
        job = self.machine.job(name, tables, **training)
        return expect_success(self.machine.train(job, name, "--steps", num_steps, *options))


def expect_success(run: Run) -> Run:
    """The run itself; RuntimeError with the end of what it said where it failed."""
    if run.exit_code:
        raise RuntimeError(f"exit code {run.exit_code}: {' '.join(run.output.split())[-300:]}")
    return run


def one_gpu_each(bench: Bench) -> Outcome:
    """Ranks of a training, then processes with the backend of torch.distributed, whose CUDA tensors must arrive."""
    if bench.machine.device != "cuda":
        return Outcome("no GPU", None)
    gpus = list(bench.run("1f1b").gpus_by_process.values())
    alone = bench.machine.num_gpus == 1 or len(set().union(*gpus)) == bench.machine.num_ranks
    others, is_right = backend(bench.machine.device)
    each = bool(gpus) and all(len(of) == 1 for of in [*gpus, *others.values()])
    sent = "as sent" if is_right else "**not** as sent"
    figure = f"{len(gpus)} processes on {len(set().union(*gpus))} GPUs; {len(others)} of the backend, tensors {sent}"
    return Outcome(figure, each and alone and is_right)


def same_losses(bench: Bench) -> Outcome:
    losses = bench.run("1f1b").losses
    cpu = largest_difference(losses, bench.run("cpu", "1f1b", "cpu", 2).losses)
    orders = max(largest_difference(bench.run(method, method).losses, losses) for method in ("zb-h1", "zb-2p"))
    return Outcome(f"{cpu:.1e} from a CPU, {orders:.1e} between orders", cpu <= 1e-4 and orders <= 1e-6)


def same_bits(bench: Bench) -> Outcome:
    differs = bench.run("1f1b").losses != bench.run("again", "1f1b").losses
    return Outcome("other bits" if differs else "the same bits", not differs)


def predicted_step(bench: Bench) -> Outcome:
    """Prediction by a profile of this machine, in bf16; of one rank where all would share a GPU."""
    machine = bench.machine
    num_ranks = machine.num_gpus if machine.num_gpus > 1 else 1
    job = machine.job("predicted", machine.tables(num_ranks), precision=precision(bench))
    profile = machine.folder / "profile.json"
    farpipe("profile", job, "-o", profile, "--device", machine.device, env=machine.env)
    run = expect_success(machine.train(job, "predicted", "--steps", 30, "--profile", profile))
    steady = run.lines[10:]
    step_s, bubble = (statistics.median(line[key] for line in steady) for key in ("makespan_s", "bubble"))
    prediction = run.plan["prediction"]
    error, points = prediction["makespan_s"] / step_s - 1, 100 * (prediction["bubble_ratio"] - bubble)
    beside_ms = 1e3 * statistics.median(line["step_s"] - line["makespan_s"] for line in steady)
    figure = f"{num_ranks} ranks: {100 * error:+.1f} %, bubble {points:+.1f} points, {beside_ms:.0f} ms beside actions"
    return Outcome(figure, abs(error) <= 0.1 and abs(points) <= 3)


def busy_gpu(bench: Bench) -> Outcome:
    if bench.machine.device != "cuda":
        return Outcome("no GPU", None)
    from benchmarks.gpu.busy import busy

    share, gap_us, calls = busy(bench.machine.model)
    times, error = added_product("cuda")
    figure = f"busy {100 * share:.1f} %, longest gap {gap_us:.0f} us, {calls:.0f} Python calls a layer; "
    figure += f"W in bf16 {times:.2f} x its product, error {error:.0e}"
    return Outcome(figure, share > 0.95 and gap_us < 200 and times <= 1.1 and error < 1e-4)


def memory(bench: Bench) -> Outcome:
    if bench.machine.device != "cuda":
        return Outcome("no GPU", None)
    run = bench.run("1f1b")
    found = run.lines[-1]["cuda_peak_max_bytes"] / max(run.plan["prediction"]["peak_memory_bytes"])
    return Outcome(f"{found:.2f} of the plan", 0.9 <= found <= 1)


def shared_stages(bench: Bench) -> Outcome:
    """Losses of tensor and context parallelism and of FSDP2, beside one another."""
    machine = bench.machine
    if machine.num_gpus == 1:
        return Outcome(NEEDS_TWO, None)
    from benchmarks.gpu.qwen import qwen

    half = machine.num_ranks // 2
    machine.model = {"hugging_face": str(qwen(machine.folder / "qwen", machine.model))}
    layouts = {"tensor": "tensor = 2\ndata = 1", "context": "context = 2\ndata = 1", "zero": "tensor = 1\ndata = 2"}
    losses = [
        bench.trained(
            name, machine.tables(2 * half, layout=f"pipeline = {half}\n{keys}"), zero=3 * (name == "zero")
        ).losses
        for name, keys in layouts.items()
    ]
    worst = max(largest_difference(one, losses[0]) for one in losses[1:])
    return Outcome(f"{worst:.1e} between tensor, context and FSDP2", worst <= 1e-3)


def lost_rank(bench: Bench) -> Outcome:
    """One killed, then one stopped for a while: of two that share a stage over NCCL, where there are GPUs for that."""
    machine = bench.machine
    layout = f"pipeline = {machine.num_ranks // 2}\ndata = 2" if machine.num_gpus > 1 else ""
    job = machine.job("killed", machine.tables(machine.num_ranks, layout=layout), zero=3 if layout else 0)
    killed = machine.train(job, "killed", "--steps", 1000, kill=signal.SIGKILL)
    left = ranks_of(killed.folder)
    took_s = killed.ended_after_s
    if took_s is None:
        return Outcome("it did not come to its third step", False)
    figure = f"ended {took_s:.1f} s after, exit code {killed.exit_code}, {len(left)} processes left"
    if took_s > 15 or killed.exit_code != 6 or left:
        return Outcome(figure, False)
    limits = ("--set", f"run.timeout_s={STOPPED_S / 2}", "--set", f"run.outage_s={4 * STOPPED_S}")
    options = ("--steps", STOPPED_STEPS, *limits)
    stopped = machine.train(job, "stopped", *options, kill=signal.SIGSTOP, pause_s=STOPPED_S)
    went_on = stopped.exit_code == 0 and len(stopped.lines) == STOPPED_STEPS
    return Outcome(f"{figure}; stopped for {STOPPED_S:.0f} s: exit code {stopped.exit_code}", went_on)


def reduced_gradients(bench: Bench) -> Outcome:
    """The longest reduce between two replicas at two sites, beside bytes over 2 GB/s."""
    machine = bench.machine
    if machine.device == "cuda" and machine.num_gpus == 1:
        return Outcome(NEEDS_TWO, None)
    link = 'latency = "0.1 ms"\nbandwidth = "16 Gbit/s"'
    tables = machine.tables(2, sites=2, link=link, layout="pipeline = 1\ndata = 2")
    run = bench.trained("replicas", tables)
    line = run.lines[-1]
    ideal_s = max(line["link_bytes"].values()) / 2e9
    ratio = line["exposed_inter_site_max_s"] / ideal_s if ideal_s else float("inf")
    return Outcome(f"{ratio:.2f} times, as waited for", ratio <= 2)


def checkpoints(bench: Bench) -> Outcome:
    machine = bench.machine
    tables = machine.tables(machine.num_ranks)
    run = bench.trained("checkpoints", tables, num_steps=6, checkpoint_every_steps=2)
    lines, folder = run.lines, run.folder / "checkpoints"
    num_bytes = sum(path.stat().st_size for path in sorted(folder.iterdir())[-1].iterdir())
    pause_s = max(line["pause_s"] for line in lines[1::2])
    rate = num_bytes / machine.num_ranks / pause_s / 1e9
    half = bench.trained("half", tables, num_steps=4, checkpoint_every_steps=2)
    job = machine.job("half", tables, checkpoint_every_steps=2)
    whole = machine.train(job, "half", "--resume", half.folder, "--steps", 6)
    is_equal = expect_success(whole).losses[4:] == run.losses[4:]
    grown = max(line["rss_max_bytes"] for line in lines) - lines[0]["rss_max_bytes"]
    of_state = grown / (num_bytes / machine.num_ranks)
    figure = f"{rate:.1f} GB/s a rank, memory + {of_state:.2f} x state, resumed {'equal' if is_equal else 'differs'}"
    return Outcome(figure, is_equal and (machine.device == "cpu" or (rate >= 10 and of_state <= 1.2)))


def narrow_messages(bench: Bench) -> Outcome:
    machine = bench.machine
    tables = machine.tables(2, sites=2, link='latency = "100 ms"\nbandwidth = "1 Gbit/s"', method="eager")
    begin_s = time.monotonic()
    run = bench.trained("narrow", tables, num_steps=8, wire_type="int8", precision=precision(bench))
    ratio = run.lines[-1]["makespan_s"] / run.plan["prediction"]["makespan_s"]
    took_s, rounding = time.monotonic() - begin_s, rounding_ms(machine.device, rounded_bytes(machine.device))
    figure = (
        f"{ratio:.2f} of the predicted step, {took_s:.0f} s in all; a message rounded and back in {rounding:.1f} ms"
    )
    return Outcome(figure, ratio <= 1.1 and (machine.device == "cpu" or rounding <= 5))


def large_messages(bench: Bench) -> Outcome:
    """Forwards of the first rank before the first backward, 50 ms away: no message waits for room."""
    machine = bench.machine
    size = {"microbatch_size": 8, "sequence_length": 4096, "global_batch": 96} if machine.device == "cuda" else {}
    tables = machine.tables(2, sites=2, link='latency = "50 ms"\nbandwidth = "10 Gbit/s"', method="eager")
    run = bench.trained("large", tables, num_steps=4, precision=precision(bench), **size)
    first, *_, last = (line["makespan_s"] for line in run.lines)
    ratio = last / run.plan["prediction"]["makespan_s"]
    return Outcome(f"{ratio:.2f} of the predicted step; the first one {first / last:.2f} of the last", ratio <= 1.1)


def precision(bench: Bench) -> str:
    return "bf16" if bench.machine.device == "cuda" else "fp32"


def farpipe(*arguments: object, env: dict[str, str]) -> None:
    import subprocess
    import sys

    subprocess.run([sys.executable, "-m", "farpipe", *map(str, arguments)], check=True, env=env, capture_output=True)


CHECKS: Final = (
    Check(1, "each process on its own GPU, the backend's too", "one each, tensors as sent", one_gpu_each),
    Check(2, "pipeline, fp32: beside a CPU, and three orders", "1e-4 and 1e-6", same_losses),
    Check(3, "the same run twice", "the same bits", same_bits),
    Check(4, "predicted step, after `farpipe profile`", "10 %, bubble 3 points", predicted_step),
    Check(5, "F and B of a stage under torch.profiler; W", "busy > 95 %, gaps < 200 us; 1.1 x, 1e-4", busy_gpu),
    Check(6, "memory beside the plan's", "0.9 to 1.0", memory),
    Check(7, "tensor, context and FSDP2, two processes a stage", "1e-3", shared_stages),
    Check(8, "a rank killed; one stopped for 20 s", "15 s, exit code 6, none left; 0", lost_rank),
    Check(9, "gradients of two replicas", "2 x bytes / 2 GB/s", reduced_gradients),
    Check(10, "a checkpoint every two steps, and resumed", "10 GB/s, + 1.2 x state, equal", checkpoints),
    Check(11, "int8 messages over 100 ms, 1 Gbit/s", "within 10 % of the plan; 64 MB in 5 ms", narrow_messages),
    Check(12, "messages of 128 MB over 50 ms, eager", "within 10 % of the plan", large_messages),
)
