"""Weights of a model's files, as processes of one site read them: each its own part."""

from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from farpipe.core.errors import InputError
from farpipe.engine.site.mesh import stage_mesh
from farpipe.engine.stages import hugging_face_weights
from farpipe.engine.stages.divided_stages import divide_module
from farpipe.engine.stages.hugging_face import HuggingFaceSlice, build
from farpipe.engine.stages.self_check import shrunk
from farpipe.engine.stages.slices import StageSlice
from farpipe.engine.stages.weight_grads import local_part

WHOLE = StageSlice(0, 6, True, True)


class Counting:
    """A slice of a file that notes how many elements are read; transformers reads in several threads."""

    def __init__(self, inner, counts):
        self._inner, self._counts = inner, counts

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def __getitem__(self, place):
        found = self._inner[place]
        self._counts.append(found.numel())
        return found


def loads(folder, name, degrees, vocab_size=64, tied=False):
    """Names of parameters that differ from a whole load's, and elements that processes read beyond their own."""
    data, tensor = degrees
    config = shrunk(AutoConfig.for_model(name))
    config.update({"vocab_size": vocab_size, "tie_word_embeddings": tied})
    path, counts = Path(folder) / name, []
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    dist.barrier()
    whole, divided = loaded(path, None, []), loaded(path, stage_mesh("cpu", data=data, tensor=tensor), counts)
    expected = dict(whole.named_parameters())
    wrong, own = [], 0
    for key, parameter in divided.named_parameters():
        assert isinstance(parameter, DTensor), key
        wrong += [] if torch.equal(parameter.full_tensor(), expected.pop(key)) else [key]
        own += local_part(parameter).numel()
    wrong += ["mapped"] if str(path) in Path("/proc/self/maps").read_text() else []
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sum(counts) - own)
    return {"wrong": [*wrong, *expected], "beyond": everywhere}


def loaded(path, mesh, counts):
    """The whole model as one stage, divided over `mesh` before it is read."""
    config = hugging_face_weights.read_config(path)
    module = HuggingFaceSlice(build(config, torch.float32), WHOLE)
    if mesh is not None:
        divide_module(module, mesh, torch.float32)
    stored = hugging_face_weights._stored

    def counted(*arguments):
        return {key: Counting(found, counts) for key, found in stored(*arguments).items()}

    with patch.object(hugging_face_weights, "_stored", counted):
        hugging_face_weights.load(module, path)
    return module.to("cpu")


def refusals(folder, degrees):
    """What every process says of files that lack a tensor, and of a config with other sizes."""
    from safetensors.torch import load_file, save_file

    data, tensor = degrees
    mesh, path, said = stage_mesh("cpu", data=data, tensor=tensor), Path(folder) / "bad", []
    if dist.get_rank() == 0:
        config = shrunk(AutoConfig.for_model("llama"))
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    dist.barrier()
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    for change in ({name: None}, {name: torch.zeros(30, 48)}):
        dist.barrier()
        if dist.get_rank() == 0:
            kept = {key: value for key, value in (tensors | change).items() if value is not None}
            save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()
        try:
            loaded(path, mesh, [0])
            said.append("")
        except InputError as error:
            said.append(str(error).partition(": ")[2])
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, said)
    return {"said": everywhere}
