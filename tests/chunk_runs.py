"""Runs on chunks for tests: small models, texts of mixed lengths, and planning without a process of its own."""

import numpy as np
import torch
from torch.nn import functional

from farpipe.core.spec import Cluster, Data, SiteLink, Training, preset_site
from farpipe.engine.control.chunk_planner import plan_step
from farpipe.engine.executor.step_plans import PlannedStep
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages.decoder import Decoder, Numerics, initialise
from farpipe.engine.stages.slices import StageSlice
from farpipe.planning.cost import place_evenly
from farpipe.planning.cost.job_chunks import job_chunk_costs
from farpipe.planning.cost.layout import Layout
from farpipe.planning.cost.stage import JobCosts
from farpipe.planning.documents.batches import load_document_batches
from farpipe.planning.workload import StepPlan
from small_models import LLAMA, even_partition

MODEL = LLAMA.model_copy(update={"num_layers": 4, "vocab_size": 256})
TRAINING = {
    "sequence_length": 64,
    "global_batch": 5,
    "microbatch_size": 1,
    "precision": "fp32",
    "learning_rate": 1e-2,
    "seed": 7,
    "checkpoint_every_minutes": 0,
    "zero": 0,
}
LENGTHS = (60, 3, 41, 7, 1, 12, 90, 22, 5, 5, 33, 2)


def write_documents(folder, lengths=LENGTHS, seed=0):
    """A folder of texts of so many bytes each, less the two between documents."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(seed)
    for index, length in enumerate(lengths):
        letters = draw.integers(97, 123, max(0, length - 2)).astype(np.uint8)
        (folder / f"{index:03}.txt").write_bytes(letters.tobytes())
    return folder


def make_run(
    folder,
    *,
    packing="elastic",
    ranks=2,
    virtual=1,
    replicas=1,
    across=False,
    num_steps=4,
    latency_s=None,
    model=MODEL,
    profiles=None,
    held_out=0.0,
    **fields,
):
    """A run on a CPU at one site, or over as many sites as ranks where there is a latency between them.

    `across`: every replica is at a site of its own.
    """
    training = Training(num_steps=num_steps, **TRAINING | fields.pop("training", {}))
    homes = tuple("abcd"[:replicas]) if across else ()
    names = ["a"] * ranks if latency_s is None or across else [*"abcd"[:ranks]]
    each = ranks if across else ranks * replicas if latency_s is None else replicas
    apart = homes or tuple(dict.fromkeys(names))
    pairs = [(a, b) for a in apart for b in apart if a != b]
    links = [SiteLink(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=1e8) for a, b in pairs]
    sites = tuple(preset_site(name, "cpu", each) for name in apart)
    cluster = Cluster(sites=sites, links=tuple(links))
    partition = even_partition(model, ranks * virtual)
    layout = Layout(ranks, replicas, 1, virtual, 1, 1, homes)
    placements = place_evenly(names, [end - first for first, end in partition])
    costs = job_chunk_costs(JobCosts(model, training), layout, placements, cluster, 64, 1, profiles)
    first = plan_step(costs, packing, np.array([4] * replicas), replicas, 0.1)
    plan = StepPlan.from_data(first["plans"][0], "plan")
    return RunSpec.bare(
        problem=plan.problem(costs),
        schedule=plan.schedule,
        sites=tuple(names),
        replicas=tuple((home,) * ranks for home in homes) or (tuple(names),) * replicas,
        num_steps=num_steps,
        model=model,
        training=training,
        data=Data(source=str(folder), packing=packing, held_out=held_out),
        partition=partition,
        chunk_costs=costs,
        **fields,
    )


class PlanningHere:
    """A StepPlanner that plans when it is asked for the answer."""

    def __init__(self, run, run_dir=None, budget_s=0.05):
        self.run, self.budget_s, self.lengths = run, budget_s, {}
        self.closed = False

    def ask(self, step, lengths):
        self.lengths[step] = lengths

    def answer(self, step, *, patient):
        costs, packing, count = self.run.chunk_costs, self.run.plan.data.packing, self.run.num_replicas
        told = plan_step(costs, packing, self.lengths.pop(step), count, self.budget_s)
        plans = tuple(StepPlan.from_data(plan, "plan") for plan in told["plans"])
        return PlannedStep(plans, told["facts"])

    def close(self):
        self.closed = True


def train_whole(run, dtype, num_steps=None):
    """The same training in one process on whole documents, without chunks: losses, norms and the module."""

    training, model = run.plan.training, run.plan.model
    module = Decoder(model, StageSlice(0, model.num_layers, True, True), 64, Numerics(dtype, dtype))
    initialise(module, training.seed)
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas)
    documents = load_document_batches(run.plan.data, model, training)
    losses, norms = [], []
    for step in range(num_steps or run.num_steps):
        batch = [torch.from_numpy(one) for one in documents.batch(step).tokens]
        count = max(1, sum(len(one) - 1 for one in batch))
        total = 0.0
        for one in (one for one in batch if len(one) > 1):
            loss = functional.cross_entropy(module(one[None, :-1])[0], one[1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), training.clip_norm)))
        adamw.step()
        adamw.zero_grad()
    return losses, norms, module
