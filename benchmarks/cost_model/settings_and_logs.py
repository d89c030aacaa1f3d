"""Published trainings as their users have them: options of Megatron-LM and a log, through `farpipe import` and `check`.

Every row of MLPerf's and Megatron-Bridge's tables whose layout Megatron-LM's options can say becomes a list of options
and a log; what comes out is what a user of such a training would read. The same points go through published_steps.py
without this way, so that the two columns of errors should agree.

    FARPIPE_DATA=FOLDER python -m benchmarks.cost_model.settings_and_logs
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from benchmarks.cost_model.narrow_steps import DEVICES, DEVICES_2025, NVIDIA_FP8, replays_graphs, rows
from benchmarks.shared.data import data_folder
from farpipe.core.errors import FarpipeError
from farpipe.core.spec import parse_job
from farpipe.interop.comparison import compare
from farpipe.interop.files import draft_of_devices, read_draft
from farpipe.interop.logs import read_log
from farpipe.interop.steady_steps import measured

NUM_STEPS = 20
FORMATS = {"fp8": "--fp8-format hybrid", "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8", "nvfp4": "--fp4-format e2m1"}


def options(row: dict[str, str], device: str) -> str:
    """The row as options; GPT-3 has its own shape, the others are Llamas."""
    is_llama = "Llama" in row["model"]
    llama = "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    llama += f"--position-embedding-type rope --group-query-attention --num-query-groups {row['kv_heads']}"
    gpt = f"--max-position-embeddings {row['seq']}"
    narrow = NVIDIA_FP8 if row["gpu"].startswith(("H1", "H2", "Blackwell")) else {}
    return " ".join(
        [
            f"--nnodes {row['nodes']} --nproc-per-node {row['gpus_per_node']}",
            f"--num-layers {row['layers']} --hidden-size {row['hidden']} --num-attention-heads {row['heads']}",
            f"--ffn-hidden-size {row['ffn']} --vocab-size {row['vocab']} --make-vocab-size-divisible-by 1",
            llama if is_llama else gpt,
            f"--seq-length {row['seq']} --global-batch-size {row['gbs']} --micro-batch-size {row['mbs']} --bf16",
            f"--tensor-model-parallel-size {row['TP']} --pipeline-model-parallel-size {row['PP']}",
            f"--context-parallel-size {row['CP']} --hidden-dropout 0 --attention-dropout 0",
            f"--num-virtual-stages-per-pipeline-rank {row['VPP']}" if row["VPP"] else "",
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split" if is_llama else "",
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel",
            FORMATS[row["precision"]],
            "--fp8-param-gather --grad-reduce-in-bf16 --tp-comm-overlap" if narrow else "",
            "--cuda-graph-impl local" if replays_graphs(row, device) else "",
        ]
    )


def trainings(base: Path) -> Iterator[tuple[str, dict[str, str], str]]:
    """Device, row, and the words for it."""
    for row in rows(base / "published" / "mlperf_pretraining_steps.csv"):
        device = next((name for word, name in (DEVICES | DEVICES_2025).items() if word in row["gpu"].split()), None)
        if device is not None and row["precision"] in FORMATS:
            yield device, dict(row), f"{row['model']} {row['precision']} on {row['GPUs']} {device}"


def main() -> None:
    """Print a line for each training."""
    base = data_folder("published")
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        script, log = Path(folder) / "options.sh", Path(folder) / "train.log"
        for device, row, words in trainings(base):
            script.write_text(options(row, device) + "\n", encoding="utf-8")
            milliseconds = 1e3 * float(row["step_s"])
            log.write_text(
                "".join(
                    f"iteration {step}/ 99 | elapsed time per iteration (ms): {milliseconds:.3f} |\n"
                    for step in range(1, NUM_STEPS)
                ),
                encoding="utf-8",
            )
            try:
                job = parse_job(draft_of_devices(read_draft([script]), None, device).to_toml(device))
                found = read_log(log, job.training, int(row["GPUs"]))
                comparison = compare(job, measured(found, words), found)
            except FarpipeError as error:
                print(f"{words:50} {str(error).splitlines()[0]:.120}")
                continue
            errors.append(abs(comparison.error))
            first = comparison.suspects[0].what if comparison.suspects else ""
            print(f"{words:50} {comparison.measured.step_s:9.3f} s {comparison.error:+7.1%}  {first:.60}", flush=True)
    if errors:
        print(f"{len(errors)} trainings, mean error without signs {mean(errors):.1%}")


if __name__ == "__main__":
    sys.exit(main())
