"""Settings with a value of another kind, with none, or without a key: a job, or a message, and never a traceback."""

import copy
import json
import random
import tomllib

import pytest
import yaml

from farpipe.core.errors import FarpipeError
from farpipe.core.spec import parse_job
from farpipe.interop.files import draft_of_devices, read_draft
from interop.test_deepspeed import NEOX
from interop.test_known_options import DEEPSPEED, TITAN, TRAINER
from interop.test_megatron import BRIDGE, NEMO

BAD = (
    *(None, [], {}, -1, 0, 1e400, "x", True, [1, "a"], {"a": {"b": 1}}, "", 10**30, "${A}", "$(x)", "[1]*9", "\ufffd"),
    *([[]], [None], 3.5, "1e9", "t|t", "([0]*3"),
)
PIPELINE = """steps = 3
local_batch_size = 4
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_layers_per_stage = 4
pipeline_parallel_schedule = "Interleaved1F1B"
module_fqns_per_model_part = [["layers.0"], ["layers.1"]]
[activation_checkpoint]
mode = "full"
"""
ACCELERATE = {
    "parallelism_config": {"tp_size": 2, "cp_size": 2, "dp_shard_size": 2}, "fsdp_config": {"fsdp_version": 2},
    "adapter": "lora", "lora_r": 8, "lora_target_modules": ["q_proj"], "optim": "adamw_torch", "num_machines": 1,
}  # fmt: skip
SAVED = {
    "model_spec": {"name": "llama3", "flavor": "8B"}, "parallelism": {"pipeline_parallel_degree": 2},
    "training": {"max_context_length": 512, "num_tokens_per_microbatch_per_dp_rank": 1024},
    "optimizer": {"param_groups": [{"optimizer_kwargs": {"lr": 1}}]}, "activation_checkpoint": {"a": 1},
}  # fmt: skip
WHOLE = {
    "train_batch_size": 32, "gradient_accumulation_steps": 2, "tensor_parallel": {"autotp_size": 2},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlap_comm": True},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
}  # fmt: skip
OPTIONS = (
    "--num-layers 40 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 4 --num-experts 8 --vocab-size 100 "
    "--num-layers-per-virtual-pipeline-stage 5 --moe-layer-freq ([0]*3+[1]*37) --window-size 128,0 "
    "--multi-latent-attention --pipeline-model-parallel-layout Et*10|t*10|t*10|t*10L --cp-comm-type a2a "
    "--context-parallel-size 2 --decoder-first-pipeline-num-layers 9 --nproc_per_node 8 --nnodes 4"
)
FILES = {
    "neox.yml": NEOX | {"activation": "swiglu", "attention_config": [[["flash"], 8]], "intermediate_size": 4128},
    "nemo.yaml": yaml.safe_load(NEMO),
    "bridge.yaml": yaml.safe_load(BRIDGE),
    "trainer.yaml": TRAINER | ACCELERATE,
    "ds.json": DEEPSPEED | WHOLE,
    "saved.json": SAVED,
    "titan.json": tomllib.loads(TITAN + PIPELINE) | {"model_spec": {}},
}


def damaged(tables, chance):
    """`tables` with one to three values replaced or left out."""
    found = copy.deepcopy(tables)
    for _ in range(chance.choice([1, 1, 2, 3])):
        places = [(found, key) for key in found]
        for table, key in places:
            places += [(table[key], inner) for inner in table[key]] if isinstance(table[key], dict) else []
        table, key = chance.choice(places) if places else ({"": 0}, "")
        if chance.random() < 0.1:
            del table[key]
        else:
            table[key] = copy.deepcopy(chance.choice(BAD))
    return found


def whole_way(path):
    """The job of a file of settings, all of whose options are accepted."""
    draft = read_draft([path], known={"A": "3"})
    draft.accept([*draft.shapes])
    if not draft.missing():
        parse_job(draft_of_devices(draft, None, "v100").to_toml("v100"), "x")
        json.dumps(draft.to_data())


@pytest.mark.parametrize("name", [*FILES, "options.sh"])
def test_damaged_settings_end_in_a_job_or_a_message(name, tmp_path):
    chance = random.Random(name)
    for _ in range(100):
        if name in FILES:
            tables = damaged(FILES[name], chance)
            text = json.dumps(tables) if name.endswith("json") else yaml.safe_dump(tables)
        else:
            words = OPTIONS.split()
            for _ in range(chance.choice([1, 2, 3])):
                words[chance.randrange(len(words))] = str(chance.choice(BAD))
            text = f"python x.py {' '.join(words)}"
        (tmp_path / name).write_text(text)
        try:
            whole_way(tmp_path / name)
        except FarpipeError:
            continue
