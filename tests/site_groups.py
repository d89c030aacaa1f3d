"""One step in groups of processes of several degrees, against the whole model; run by site_processes."""

import copy
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import AutoConfig

from farpipe.engine.site.mesh import CONTEXT, process_groups, shares_in, stage_mesh
from farpipe.engine.site.sharding import StepReduction, shard
from farpipe.engine.site.twin_stage import twin_chunk_stage
from farpipe.engine.stages.chunk_stage import chunk_batch
from farpipe.engine.stages.divided_stages import twins_in
from farpipe.engine.stages.hugging_face import HuggingFaceSlice
from farpipe.engine.stages.self_check import random_model, shrunk
from farpipe.engine.stages.slices import StageSlice
from farpipe.engine.stages.stage import Boundary
from farpipe.planning.workload import Chunk, Slice
from small_models import relative_error


def stuck(first, degree):
    """What process 0 says of a group whose last process does not come, after 3 s."""
    stage, _, _ = small_stage("llama", timeout_s=3)
    chunk = Chunk((Slice(0, 0, 12, 12),))
    batch = replace(chunk_batch([chunk], [torch.arange(12)]), groups=((first, degree),))
    stage.begin_chunks(batch)
    if dist.get_rank() == first + degree - 1:
        time.sleep(6)  # there, but elsewhere
        return {}
    try:
        stage.forward(0, None)
    except RuntimeError as error:
        return {"said": str(error)}
    return {"said": ""}


def in_groups(name, steps, heads=8, key_heads=4):
    """Largest relative errors of loss and gradients in each of `steps`: (lengths of a chunk, first process, degree).

    The last document, of one token, is that of processes without others.
    """
    stage, reduction, whole = small_stage(name, heads, key_heads)
    return [one_step(whole, stage, reduction, [(row, (first, d)) for row, first, d in step]) for step in steps]


def small_stage(name, heads=8, key_heads=4, timeout_s=30):
    """(a stage with all layers of a small model, its reduction, the whole model)."""
    torch.manual_seed(0)
    config = shrunk(AutoConfig.for_model(name), 4)
    config.update({"num_attention_heads": heads, "num_key_value_heads": key_heads})
    whole = random_model(config, torch.float64)
    mesh = stage_mesh("cpu", data=1, context=dist.get_world_size())
    module = HuggingFaceSlice(copy.deepcopy(whole), StageSlice(0, config.num_hidden_layers, True, True))
    shard(module, module.blocks, shares_in(mesh))
    groups = process_groups(mesh[CONTEXT], range(1, dist.get_world_size() + 1), timeout_s=timeout_s)
    boundary = Boundary((1, 1, config.hidden_size), whole.dtype)
    stage = twin_chunk_stage(module, boundary, twins_in(mesh), groups=groups)
    return stage, StepReduction(module, stage.store), whole


def one_step(whole, stage, reduction, step):
    lengths = [length for row, _ in step for length in row]
    documents = [torch.randint(whole.config.vocab_size, (length,)) for length in lengths]
    numbers = iter(range(len(lengths)))
    chunks = [Chunk(tuple(Slice(next(numbers), 0, length, length) for length in row)) for row, _ in step]
    batch = replace(chunk_batch(chunks, documents), groups=tuple(group for _, group in step))
    for model in (stage.module, whole):
        model.zero_grad()
    reduction.begin()
    stage.begin_chunks(batch, [2] * len(chunks), keeps_attention=True)
    for microbatch in range(len(chunks)):
        stage.forward(microbatch, None)
        stage.backward(microbatch, None)
    reduction.end()
    loss = torch.tensor(stage.loss, dtype=torch.float64)
    dist.all_reduce(loss)
    expected = reference(whole, documents, batch.num_target_tokens)
    errors = {"loss": abs(float(loss) - expected) / expected}
    found = {name: p.grad for name, p in stage.module.named_parameters()}
    for name, parameter in whole.named_parameters():
        grad = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        errors[name] = relative_error(grad, parameter.grad)
    name = max(errors, key=errors.get)
    return {"error": errors[name], "of": name, "chunks_here": len(stage._losses)}


def reference(whole, documents, count):
    total = 0.0
    for document in (one for one in documents if len(one) > 1):
        logits = whole(input_ids=document[None], use_cache=False).logits[0, :-1]
        loss = functional.cross_entropy(logits, document[1:], reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total
