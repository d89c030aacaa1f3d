"""Logs of training frameworks: seconds of steps, restarts, warm-up, outliers; broken ones."""

import gzip
import json
import tracemalloc

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import Training, parse_job
from farpipe.interop.logs import MAX_LINE, is_log, read_log, read_log_of
from farpipe.interop.steady_steps import measured
from interop.test_megatron import SCRIPT
from interop.test_traces import JOB

TRAINING = Training(sequence_length=4096, global_batch=64)
NUM_DEVICES = 16


def megatron(step, milliseconds=2250.0, batch=64):
    return (
        f" [2026-01-01 10:00:00] iteration {step:8d}/     100 | consumed samples: {batch * step:12d} | "
        f"elapsed time per iteration (ms): {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): 412.3 | "
        "learning rate: 1.5E-05 | "
        f"global batch size: {batch:5d} | lm loss: 1.0E+01 | loss scale: 1.0 | grad norm: 3.1 |"
    )


def torchtitan(step, seconds=2.25):
    tps = TRAINING.tokens_per_step / NUM_DEVICES / seconds
    return (
        f"[titan] 2026-01-01 10:00:00,000 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  8.0  \x1b[38;2;54m"
        f"grad_norm:  3.2  \x1b[36mmemory: 33.80GiB(42.72%)  \x1b[34mtps: {tps:,.1f}  \x1b[36mtflops: 71.5  "
        "\x1b[35mmfu: 7.2%\x1b[39m"
    )


def nemo(step, seconds=2.25):
    bar = f"Epoch 0: :  {step}%| {step}/100 [00:23<03:35, v_num=1, reduced_train_loss=9.1, global_step={step}.000, "
    return f"{bar}consumed_samples={64 * step}.0, train_step_timing in s={seconds}]"


def deepspeed(step, seconds=2.25):
    return f"steps: {step} loss: 7.12 iter time (s): {seconds:.3f} samples/sec: {64 / seconds:.3f}"


def deepspeed_rate(step, seconds=2.25):
    return (
        f"[2026-01-01] [INFO] [timer.py:260:stop] epoch=0/micro_step={4 * step}/global_step={step}, "
        f"RunningAvgSamplesPerSec=20.1, CurrSamplesPerSec={64 / seconds}, MemAllocated=12.3GB, MaxMemAllocated=30.5GB"
    )


def mlperf(step, seconds=2.25):
    value = {"train_step_time": seconds, "reduced_train_loss": 5.0}
    entry = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": value}
    return ":::MLLOG " + json.dumps(entry | {"metadata": {"file": "x.py", "lineno": 1, "step": step}})


def dllogger(step, seconds=2.25):
    """As in src/utils/training_metrics/examples/dllogger.json of AI-Hypercomputer/gpu-recipes."""
    data = {"reduced_train_loss": 7.9, "global_step": float(step), "train_step_timing in s": seconds, "epoch": 0}
    return "DLLL " + json.dumps({"timestamp": "1727486493.2", "type": "LOG", "step": step, "data": data})


def trainer(step, seconds=2.25):
    """tqdm's bar as in experiments/gpt2-hf-ds/hf_ds_gpt2_base_n4-1832555.out of bigscience-workshop/bigscience."""
    rate = f"{seconds:.2f}s/it" if seconds >= 1 else f"{1 / seconds:.2f}it/s"
    return f" {step:2}%|\u258b         | {step}/100 [00:58<14:41, {rate}]"


def farpipe(step, seconds=2.25):
    return json.dumps({"step": step, "step_s": seconds, "loss": 3.0})


FORMS = {
    "Megatron-LM": lambda step, seconds=2.25: megatron(step, 1e3 * seconds),
    "torchtitan": torchtitan,
    "NeMo": nemo,
    "DeepSpeed": deepspeed,
    "MLPerf": mlperf,
    "farpipe": farpipe,
    "a progress bar (smoothed over some steps)": trainer,
}


def read(tmp_path, lines, end="\n"):
    path = tmp_path / "train.log"
    path.write_text(end.join(lines) + end, newline="")
    return read_log(path, TRAINING, NUM_DEVICES)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_every_framework_s_steps_are_read(name, end, tmp_path):
    """Between other lines, with a slow start and one step that wrote a checkpoint."""
    seconds = [9.0, 4.0, *[2.25] * 10, 30.0, *[2.25] * 7]
    lines = ["starting", *(FORMS[name](step, s) for step, s in enumerate(seconds, 1)), "done"]
    log = read(tmp_path, lines, end)
    found = measured(log, "train.log")
    assert log.framework == name
    assert found.step_s == pytest.approx(2.25, rel=1e-4)
    assert found.num_steps == 17
    assert found.notes == ("2 steps of warm-up and 1 outlier left out",)


def test_samples_a_second_become_seconds(tmp_path):
    assert measured(read(tmp_path, map(deepspeed_rate, range(1, 9))), "x").step_s == pytest.approx(2.25)


def test_seconds_go_before_rates_where_a_log_has_both(tmp_path):
    """As Megatron-DeepSpeed writes them: the rate without the data loader first, its own line after it."""
    own = [megatron(step).replace("elapsed time per iteration (ms): 2250.0", "elapsed_time_per_iteration_ms=2250.0")
           for step in range(1, 9)]  # fmt: skip
    lines = [line for step, mine in enumerate(own, 1) for line in (deepspeed_rate(step, 2.0), mine)]
    log = read(tmp_path, lines)
    assert log.framework == "Megatron-LM"
    assert [len(attempt) for attempt in log.attempts] == [8]
    assert measured(log, "x").step_s == pytest.approx(2.25)


RAMP = [(step, 24 * 2 ** ((step - 1) // 8)) for step in range(1, 25)]  # 24, 48 and 96 for 8 steps each


def neox(step, seconds, batch):
    """TensorBoard's CSV of GPT-NeoX or Megatron-LM, as Weights & Biases exports it."""
    return f"{step},{seconds},{batch}"


def by_samples(step, seconds, batch):
    """NeMo's bar, which tells the samples so far instead of the batch."""
    return nemo(step, seconds).replace(f"={64 * step}.0", f"={sum(size for number, size in RAMP if number <= step)}.0")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("x.log", lambda step, seconds, batch: megatron(step, 1e3 * seconds, batch)),
        (
            "x.log",
            lambda *of_step: megatron(of_step[0], 1e3 * of_step[1], 0).replace("size:     0", f"size={of_step[2]}"),
        ),
        ("x.log", by_samples),
        ("x.csv", neox),
    ],
)
@pytest.mark.parametrize(("wanted", "counted"), [(None, 96), (48, 48), (24, 24), (96, 96), (7, 96)])
def test_steps_belong_to_the_batch_of_their_own_line(name, line, wanted, counted, tmp_path):
    """The job's batch counts where the log has it, else the last, however many steps others have."""
    lines = [line(step, batch / 24 + (step % 3) * 1e-3, batch) for step, batch in RAMP[: 20 + 4 * (wanted == 96)]]
    head = "Step,runtime/iteration_time,train/batch-size"
    (tmp_path / name).write_text("\n".join([head, *lines]) + "\n")
    training = wanted and Training(sequence_length=4096, global_batch=wanted)
    log = read_log(tmp_path / name, training)
    found = measured(log, "x")
    assert (log.batch, log.facts["global_batch"]) == (counted, counted)
    assert found.step_s == pytest.approx(counted / 24, rel=3e-3)
    assert f"the steps of global batch {counted} count" in found.notes[0]


@pytest.mark.parametrize("unit", ["ms", "s", "sec", "seconds", "us"])
def test_units_of_a_step_are_read(unit, tmp_path):
    scale = {"ms": 1e3, "us": 1e6}.get(unit, 1.0)
    lines = [megatron(step, 2.25 * scale).replace("(ms)", f"({unit})") for step in range(1, 9)]
    assert measured(read(tmp_path, lines), "x").step_s == pytest.approx(2.25, rel=0.03)


def test_a_unit_that_is_not_known_is_no_step(tmp_path):
    lines = [megatron(step).replace("(ms)", "(furlongs)") for step in range(1, 9)]
    with pytest.raises(InputError, match="no step of a training was found"):
        read(tmp_path, lines)


def test_dllogger_is_read(tmp_path):
    facts = 'DLLL {"type": "LOG", "step": "PARAMETER", "data": {"cfg/global_batch_size": 64, "cfg/num_layers": 96}}'
    log = read(tmp_path, [facts, *map(dllogger, range(1, 9)), dllogger(9)[:-20]])
    assert (log.framework, measured(log, "x").step_s, log.num_unreadable) == ("NeMo", pytest.approx(2.25), 1)
    assert log.facts == {"global_batch": 64}


def test_bars_of_evaluations_and_downloads_are_no_steps(tmp_path):
    noise = [
        "Loading checkpoint shards: 100%|###| 4/4 [00:05<00:00,  1.30s/it]",
        "100%|###| 13/13 [00:05<00:00,  2.6it/s]",
    ]
    lines = [line for step in range(1, 9) for line in (trainer(step), *noise, "{'loss': 2.1, 'epoch': 0.04}")]
    log = read(tmp_path, ["100%|###| 13/13 [00:05<00:00,  2.6it/s]", *lines])
    assert measured(log, "x").step_s == pytest.approx(2.25)
    assert [len(attempt) for attempt in log.attempts] == [8]


def test_seconds_go_before_progress_bars(tmp_path):
    lines = [line for step in range(1, 9) for line in (trainer(step, 3.0), deepspeed_rate(step), trainer(step, 3.0))]
    assert read(tmp_path, lines).framework == "DeepSpeed (rate)"


def test_blocks_of_mlperf_tell_their_mean_step(tmp_path):
    """Blocks of 384 samples in 199.4 s: figures of a LoRA log of MLPerf 4.0, with 64 in a batch here."""
    lines = []
    for block in range(8):
        for key, count, at in (("block_start", block, 0), ("block_stop", block + 1, 199_434)):
            entry = {
                "time_ms": 200_000 * block + at,
                "key": key,
                "value": None,
                "metadata": {"samples_count": 384 * count},
            }
            lines.append(f"0: :::MLLOG {json.dumps(entry)}")
    log = read(tmp_path, lines)
    assert log.framework == "MLPerf (blocks)"
    assert measured(log, "x").step_s == pytest.approx(199.434 / 6)


def block(key, at_s, samples, step):
    metadata = {"samples_count": samples, "step": step}
    return ":::MLLOG " + json.dumps({"time_ms": 1000 * at_s, "key": key, "value": None, "metadata": metadata})


def test_blocks_may_count_their_own_samples(tmp_path):
    """As NVIDIA's llama2_70b_lora in mlcommons/training_results_v5.1 (theia_ngpu8), which had no step."""
    lines = [block("block_start", 0, 1536, 0), block("block_stop", 142.634, 1536, 192)]
    lines += [block("block_start", 149.244, 384, 192), block("block_stop", 185.03, 384, 240)]
    lines += [block("block_start", 191.735, 384, 240), block("block_stop", 227.526, 384, 288)]
    (found,) = read(tmp_path, lines).attempts
    assert [*found.steps] == [24, 30, 36]  # of 64 samples here, of 8 there
    assert [*found.seconds] == pytest.approx([8 * 0.7429, 8 * 0.7455, 8 * 0.7456], rel=1e-3)


def test_means_over_blocks_count_only_where_no_step_is_told(tmp_path):
    """As Cisco's hpf_n16 of llama31_8b there: each mean had been a step of its own, and a restart."""
    mean = mlperf(0, 2.5).replace('"train_step_time"', '"throughput": 123.5, "train_step_time"')
    assert [len(attempt) for attempt in read(tmp_path, [*map(mlperf, range(1, 9)), mean, mlperf(9)]).attempts] == [9]
    assert read(tmp_path, [mean]).framework == "MLPerf (means over blocks)"


TABLES = {
    "wandb": '"Step","run - iteration-time","run - iteration-time__MIN","run - iteration-time__MAX"',
    "lightning": "step,train_step_timing in s,reduced_train_loss,x",
    "torchtitan": '"_step","time_metrics/end_to_end(s)","throughput(tps)",x',
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_metrics_are_logs(kind, tmp_path):
    path = tmp_path / "metrics.csv"
    rows = [f"{step},2.25,{'' if step % 2 else 9},2.5" for step in range(1, 9)]
    path.write_text("\n".join([TABLES[kind], *rows, "9,,7,"]))
    assert measured(read_log(path, TRAINING, NUM_DEVICES), "x").step_s == pytest.approx(2.25)


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        ("Step,loss,x,y", "no metric"),
        ("time,iteration-time,x,y", "no column"),
        ("Step,a - iteration-time,b - iteration-time,y", "2 runs"),
    ],
)
def test_tables_without_times_or_with_several_runs_are_refused(head, complaint, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(f"{head}\n1,2,3,4\n")
    with pytest.raises(InputError, match=complaint):
        read_log(path, TRAINING, NUM_DEVICES)


def test_event_files_of_tensorboard_are_logs(tmp_path):
    writing = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer = writing.EventFileWriter(str(tmp_path))
    for step in range(1, 9):
        values = [Summary.Value(tag=tag, simple_value=2.25) for tag in ("iteration-time", "iteration-time vs samples")]
        writer.add_event(Event(step=step, wall_time=float(step), summary=Summary(value=values)))
    writer.close()
    for path in (tmp_path, next(tmp_path.iterdir())):
        found = read_log(path, TRAINING, NUM_DEVICES)
        assert (found.framework, measured(found, "x").step_s) == ("Megatron-LM", pytest.approx(2.25))


def test_memory_and_rates(tmp_path):
    lines = [*map(megatron, range(1, 9)), "[Rank 3] (after 2 iterations) memory (MB) | max reserved: 61440.0"]
    log = read(tmp_path, lines)
    assert log.memory_bytes == pytest.approx(60 * 2**30)
    assert [*log.tflops] == [412.3] * 8
    both = "memory (MB) | allocated: 21633.1 | max allocated: 24576.0 | reserved: 29316.0 | max reserved: 29316.0"
    assert read(tmp_path, [*map(megatron, range(1, 9)), both]).memory_bytes == pytest.approx(24 * 2**30)
    assert read(tmp_path, map(torchtitan, range(1, 9))).memory_bytes == pytest.approx(33.8 * 2**30)


def test_a_restart_begins_an_attempt_and_another_rank_does_not(tmp_path):
    lines = [line for step in range(1, 10) for line in (megatron(step), megatron(max(1, step - 1)))]
    assert len(read(tmp_path, lines).attempts) == 1
    again = [*map(megatron, range(1, 10)), *map(megatron, range(5, 15))]
    log = read(tmp_path, again)
    assert [len(attempt) for attempt in log.attempts] == [9, 10]
    assert "1 restarts: step numbers fall back" in measured(log, "x").notes


def test_lines_that_break_off_are_counted(tmp_path):
    log = read(tmp_path, [*map(megatron, range(1, 9)), megatron(9).split("2250")[0], ":::MLLOG {broken"])
    assert log.num_unreadable == 2
    assert "2 lines of steps could not be read" in measured(log, "x").notes


@pytest.mark.parametrize("lines", [["no step here"], [""], [megatron(1)[:90]]])
def test_a_log_without_steps_is_refused(lines, tmp_path):
    with pytest.raises(InputError, match="no step of a training was found"):
        read(tmp_path, lines)


def test_the_first_step_alone_is_refused_and_few_are_judged_with_a_note(tmp_path):
    with pytest.raises(InputError, match="1 step of warm-up and none after it"):
        measured(read(tmp_path, [megatron(1)]), "x")
    few = measured(read(tmp_path, [megatron(1, 9000), megatron(2), megatron(3)]), "x")
    assert (few.step_s, few.num_steps) == (2.25, 2)
    assert "only 2 steady steps: too few for more than a first look" in few.notes


def test_an_excerpt_from_the_middle_has_no_warm_up(tmp_path):
    assert measured(read(tmp_path, map(megatron, range(1990, 1994))), "x").num_steps == 4
    resumed = [megatron(5001, 9000), *map(megatron, range(5002, 5010))]
    assert measured(read(tmp_path, resumed), "x").num_steps == 8


def test_bars_of_processes_in_turn_are_one_attempt(tmp_path):
    log = read(tmp_path, [*map(trainer, range(1, 9)), *map(trainer, range(1, 9))])
    assert [len(attempt) for attempt in log.attempts] == [8]


def test_a_long_line_and_bytes_that_are_no_text_are_passed_over(tmp_path):
    path = tmp_path / "train.log"
    steps = "\n".join(map(megatron, range(1, 9))).encode()
    path.write_bytes(b"x" * 3_000_000 + b"\n\xff\xfe\x00\n" + steps)
    assert measured(read_log(path, TRAINING, NUM_DEVICES), "x").step_s == 2.25


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_log(tmp_path / "missing", TRAINING, NUM_DEVICES)


ARGUMENTS = """------------------------ arguments ------------------------
  global_batch_size ............................... {batch}
  hidden_size ..................................... {hidden}
  num_layers ...................................... {layers}
  seq_length ...................................... {length}
"""
TITAN = "Trainer is initialized with local batch size 8, global batch size {batch}, sequence length {length}, total"
MLLOG = ':::MLLOG {{"key": "global_batch_size", "value": {batch}, "metadata": {{}}}}'
OWN = {"batch": 64, "length": 4096, "layers": 4, "hidden": 64}


@pytest.mark.parametrize(
    ("head", "change"),
    [
        (ARGUMENTS, {"layers": 5}),
        (ARGUMENTS, {"hidden": 128}),
        (ARGUMENTS, {"length": 2048}),
        (TITAN, {"batch": 32}),
        (TITAN, {"length": 8192}),
        (MLLOG, {"batch": 16}),
        ("  train_batch_size ............. {batch}", {"batch": 16}),
    ],
)
def test_the_log_of_another_training_is_refused(head, change, tmp_path):
    own = parse_job(JOB)
    shape = {"num_layers": OWN["layers"], "hidden": OWN["hidden"]}
    own = own.model_copy(update={"training": TRAINING, "model": own.model.model_copy(update=shape)})
    path = tmp_path / "train.log"
    path.write_text("\n".join([head.format(**OWN), *map(megatron, range(1, 9))]))
    read_log_of(path, own)
    lines = [megatron(step).replace("size:    64", "").replace("consumed", "") for step in range(1, 9)]
    path.write_text("\n".join([head.format(**OWN | change), *lines]))
    with pytest.raises(InputError, match="the log is of another training"):
        read_log_of(path, own)


def test_a_log_that_breaks_off_inside_a_step_keeps_the_others(tmp_path):
    whole = "\n".join(map(megatron, range(1, 20)))
    for size in range(len(whole) - 200, len(whole), 20):
        path = tmp_path / "train.log"
        path.write_text(whole[:size])
        assert measured(read_log(path, TRAINING, NUM_DEVICES), "x").step_s == 2.25


@pytest.mark.parametrize("lag", [0, 1])
def test_lines_of_several_ranks_count_once(lag, tmp_path):
    """Eight ranks write the same steps, some of them a step behind, in colours and with carriage returns."""
    lines = []
    for step in range(1, 30):
        lines += [f"\x1b[36m{rank}:\x1b[0m {torchtitan(max(1, step - lag * (rank % 2)))}\r" for rank in range(8)]
    log = read(tmp_path, lines)
    assert [len(attempt) for attempt in log.attempts] == [29]
    assert measured(log, "x").step_s == pytest.approx(2.25, rel=1e-4)


def test_a_log_is_streamed(tmp_path):
    """A file of 30 MB, a third of it one line without an end, takes a few MB."""
    path = tmp_path / "train.log"
    with path.open("w") as file:
        file.write("x" * (100 * MAX_LINE) + "\n")
        for step in range(1, 2001):
            file.write(megatron(step) + "\n" + "noise of a data loader " * 400 + "\n")
    assert path.stat().st_size > 25e6
    tracemalloc.start()
    try:
        log = read_log(path, TRAINING, NUM_DEVICES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, log.attempts)) == 2000
    assert peak < 3e6


MESHES = (
    ("Building 1-D device mesh with ['dp_shard'], [16]", "tps"),
    ("Building 2-D device mesh with ('dp', 'tp'), [8, 2]", "wps"),
    ("Building device mesh with parallelism: pp=2, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=4, etp=1", "tps"),
)


@pytest.mark.parametrize(("head", "rate"), MESHES)
def test_rates_become_seconds_by_what_the_log_says_itself(head, rate, tmp_path):
    """torchtitan's first lines; without them the job is asked for."""
    path = tmp_path / "titan.log"
    steps = [f"step: {step:2}  loss: 12.2  memory: 81.67GiB(85.93%)  {rate}: 7,000  mfu: 22.7%" for step in range(1, 9)]
    path.write_text("\n".join([head, TITAN.format(**OWN), *steps]))
    log = read_log(path)
    assert (log.num_devices, measured(log, "x").step_s) == (16, pytest.approx(64 * 4096 / 16 / 7000))
    path.write_text("\n".join([TITAN.format(**OWN), *steps]))
    with pytest.raises(InputError, match="does not say the number of devices of a step: give the job"):
        read_log(path)
    assert is_log(path)


LIGHTNING = "Epoch {epoch}:  22%{bar} {step}/18 [00:17<01:02,  2.25s/it, loss=10.072, v_num=193315]"
OTHERS = {
    "deepspeed-0.5": ("[timer.py:189:stop] 0/{step}, SamplesPerSec=28.444, MemAllocated=0.26GB", 64 / 28.444),
    "deepspeed-0.7": ("0/{step}, RunningAvgSamplesPerSec=9.0, CurrSamplesPerSec=28.444, MemAllocated=0", 64 / 28.444),
    "gpt-neox": ("samples/sec: 7.8 | iteration {step:8d}/   10000 | elapsed time per iteration (ms): 2250.0 |", 2.25),
    "bionemo": (
        "Training epoch 0, iteration {step}/149 | lr: 3e-05 | global_batch_size: 64 | global_step: {step} | "
        "reduced_train_loss: 1.2 | train_step_timing in s: 2.25 | val_loss: 4.1",
        2.25,
    ),
    "lightning": (LIGHTNING.replace("{epoch}", "0").replace("{bar}", "|\u2588\u258f  |"), 2.25),
    "lightning-notebook": (LIGHTNING.replace("{epoch}", "0").replace("{bar}", ""), 2.25),
}
"""Lines as in DeepSpeed #1825, PR 2553 and #3742, bionemo-recipes PR 740, pytorch-lightning #4225 and #3866."""


@pytest.mark.parametrize("name", OTHERS)
def test_lines_of_other_versions_are_read(name, tmp_path):
    line, step_s = OTHERS[name]
    log = read(tmp_path, [line.format(step=step) for step in range(1, 10)])
    assert measured(log, "x").step_s == pytest.approx(step_s)


def test_epochs_go_on_counting(tmp_path):
    lines = [LIGHTNING.format(epoch=epoch, step=step, bar="") for epoch in range(2) for step in range(1, 19)]
    log = read(tmp_path, ["Validation DataLoader 0: 100% 1/1 [00:00<00:00, 1113.73it/s]", *lines])
    assert [[*attempt.steps] for attempt in log.attempts] == [[*range(1, 37)]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.sh", SCRIPT),
        ("a.txt", "--num-layers 4"),
        ("a.json", '{"traceEvents": []}'),
        ("a.csv", "stage,rank\n0,1\n"),
        ("a.txt", "5 packets transmitted"),
    ],
)
def test_other_files_are_no_logs(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert not is_log(tmp_path / name)
    assert not is_log(tmp_path)


def test_a_packed_log_is_told_apart(tmp_path):
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(megatron(1).encode()))
    with pytest.raises(InputError, match=r"train.log.gz: not plain text; unpack it \(gunzip\)"):
        read_log(path)
