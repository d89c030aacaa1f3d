"""Scripts that launch a training of PyTorch: DDP, FSDP and ZeRO, with the Trainer's options or with one's own."""

from pathlib import Path

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.interop.files import draft_of_devices, read_draft

SAMPLES = Path(__file__).parents[2] / "recipes" / "two_nodes"


def job_of(*files):
    return parse_job(draft_of_devices(read_draft([*files]), None, "a100-80gb").to_toml("a100-80gb"))


@pytest.mark.parametrize(
    ("names", "zero"), [(("ddp.sh",), 0), (("fsdp.sh",), 3), (("zero.sh", "ds.json"), 3), (("ds.json", "zero.sh"), 3)]
)
def test_a_script_and_a_config_are_a_job(names, zero):
    job = job_of(*(SAMPLES / name for name in names), SAMPLES / "config.json")
    training, (site,) = job.training, job.cluster.sites
    assert (training.zero, training.precision, training.recompute, training.kernels) == (zero, "bf16", "full", "eager")
    assert (training.sequence_length, training.global_batch, training.microbatch_size) == (4096, 32, 1)
    assert (site.num_devices, site.devices_per_machine, job.layout.data) == (16, 8, 16)
    assert (job.model.num_layers, job.model.tied_embeddings) == (16, True)


@pytest.mark.parametrize(
    "start",
    [
        "torchrun --nnodes=1:2 --nproc-per-node=8 train.py",
        "python -m torch.distributed.run --nnodes 2 --nproc_per_node 8 train.py",
        "accelerate launch --num_machines 2 --num_processes 16 train.py",
        "NODES=2\ntorchrun --nnodes $NODES --nproc_per_node 8 train.py",
    ],
)
def test_launchers_say_the_devices_and_the_script_the_batch(tmp_path, start):
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\n{start} --batch-size 4 --seq-len 2048 --bf16\n")
    job = job_of(script, SAMPLES / "config.json")
    assert (job.cluster.sites[0].num_devices, job.cluster.sites[0].devices_per_machine) == (16, 8)
    assert (job.training.global_batch, job.training.sequence_length, job.training.zero) == (64, 2048, 0)


def test_a_script_without_a_launcher_is_of_no_known_kind(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("echo torchrun\n")
    with pytest.raises(InputError, match="no file of a known kind"):
        read_draft([script])
