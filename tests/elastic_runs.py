"""Runs whose sites leave and return, and what is left of them."""

from itertools import pairwise

from farpipe.core.schedule.library import order
from farpipe.core.spec import Data, Model, Training
from farpipe.core.step import Hop, Link, Problem, Rank, Stage
from farpipe.engine.run_spec import RunSpec

MODEL = Model(name="tiny", num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, ffn_hidden=176, vocab_size=256)
SITES = ("zurich", "lugano")


def elastic_run(*, sites=SITES, num_ranks=1, num_steps=40, latency_s=0.01, mbit_s=100, fields=None, **training):
    """A replica of `num_ranks` stages at each of `sites`."""
    problem = Problem(
        num_microbatches=2,
        ranks=(Rank(),) * num_ranks,
        stages=tuple(Stage(rank=r, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01) for r in range(num_ranks)),
        hops=(Hop(),) * (num_ranks - 1),
        links={
            f"{a}>{b}": Link(latency_s=latency_s, bandwidth_bytes_per_s=mbit_s * 1e6 / 8)
            for a in sites
            for b in sites
            if a != b
        },
    )
    cuts = [round(stage * MODEL.num_layers / num_ranks) for stage in range(num_ranks + 1)]
    settings = {
        "sequence_length": 64,
        "global_batch": 4 * 2 * len(sites),
        "microbatch_size": 4,
        "precision": "fp32",
        "learning_rate": 2e-3,
        "checkpoint_every_minutes": 0,
        "elastic": True,
        "zero": 0,
    }
    return RunSpec.bare(
        problem=problem,
        schedule=order("1f1b", problem),
        sites=(sites[0],) * num_ranks,
        replicas=tuple((site,) * num_ranks for site in sites),
        num_steps=num_steps,
        model=MODEL,
        training=Training(**(settings | training)),
        data=Data(held_out=0.02),
        partition=tuple(pairwise(cuts)),
        **(fields or {}),
    )
