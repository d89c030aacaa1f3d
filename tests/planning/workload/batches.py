"""Jobs, corpora and costs for the tests of sequences."""

import numpy as np

from cost_jobs import A100, site
from farpipe.core.spec import Cluster, Job, Model, Pins, SiteLink, Training
from farpipe.planning.workload import chunk_costs

LLAMA = {"hidden": 4096, "num_heads": 32, "ffn_hidden": 11008, "vocab_size": 32000}


def job(num_layers=8, pipeline=4, memory_bytes=80 * 2.0**30, latency_s=None, layout=None, **training):
    """A few layers of Llama 7B on A100s with so much memory; over two sites where there is a latency between them."""
    device = A100.model_copy(update={"memory_bytes": memory_bytes})
    sites = [site("a", 64, 8, device)] if latency_s is None else [site(name, 64, 8, device) for name in "ab"]
    links = [] if latency_s is None else [link("a", "b", latency_s), link("b", "a", latency_s)]
    return Job(
        model=Model(num_layers=num_layers, **LLAMA),
        training=Training(**({"sequence_length": 32768, "global_batch": 64} | training)),
        cluster=Cluster(sites=tuple(sites), links=tuple(links)),
        layout=Pins(pipeline=pipeline, **layout or {}),
    )


def link(source, target, latency_s):
    """100 Gbit/s."""
    return SiteLink(source=source, target=target, latency_s=latency_s, bandwidth_bytes_per_s=1.25e10)


def costs(longest=65536, context=1, **more):
    """Costs of chunks on such a job."""
    return chunk_costs(job(**more), longest, context)


def mixed(count=64, longest=65536, seed=0):
    """Many short and few long lengths, one of them the longest."""
    drawn = np.random.default_rng(seed).lognormal(7.0, 1.7, count).astype(np.int64)
    return np.concatenate([np.clip(drawn[1:], 1, longest), [longest]])
