"""Models, trainings and clusters for the cost model's tests."""

from farpipe.core.spec import Cluster, Device, LocalLink, Model, Site, SiteLink, Training
from farpipe.planning.cost import JobCosts, Layout, place_evenly, step_cost

A100 = Device(
    name="a100-80gb",
    peak_flops={"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12},
    memory_bytes=80 * 2.0**30,
    memory_bandwidth_bytes_per_s=2.039e12,
)


def gpt(num_layers=4, hidden=512, num_heads=8, vocab_size=1000, **more):
    """A GPT: plain MLP of 4 x hidden, no grouped queries."""
    return Model(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        ffn_hidden=4 * hidden,
        gated_mlp=False,
        vocab_size=vocab_size,
        norm="layernorm",
        **more,
    )


def llama(**more):
    """Grouped queries and a gated MLP."""
    shape = {"num_layers": 4, "hidden": 512, "num_heads": 8, "num_kv_heads": 2, "ffn_hidden": 1408}
    return Model(**(shape | {"vocab_size": 1000} | more))


def training(sequence_length=256, global_batch=32, **more):
    """Few short sequences."""
    return Training(sequence_length=sequence_length, global_batch=global_batch, **more)


def layout(pipeline=2, data=1, tensor=1, virtual=1, microbatch_size=2, num_microbatches=None):
    """Degrees for the batch of 32 sequences that `training` has."""
    each = 32 // (data * microbatch_size) if num_microbatches is None else num_microbatches
    return Layout(pipeline, data, tensor, virtual, microbatch_size, each)


def site(name="a", num_devices=64, devices_per_machine=8, device=A100):
    """A site of DGX-like machines: 300 GB/s inside, 25 GB/s across."""
    return Site(
        name=name,
        device=device,
        num_devices=num_devices,
        devices_per_machine=devices_per_machine,
        machine_link=LocalLink(latency_s=3e-6, bandwidth_bytes_per_s=300e9),
        site_link=LocalLink(latency_s=10e-6, bandwidth_bytes_per_s=25e9),
    )


def two_sites(latency_s=0.01, there=1.25e9, back=2.5e9):
    """Sites a and b, with links that differ by direction."""
    return Cluster(
        sites=(site("a"), site("b")),
        links=(
            SiteLink(source="a", target="b", latency_s=latency_s, bandwidth_bytes_per_s=there),
            SiteLink(source="b", target="a", latency_s=latency_s, bandwidth_bytes_per_s=back),
        ),
    )


def step(model, spec, degrees, placements, cluster, **known):
    """The cost of one step; `known`: profiles, calibrations."""
    return step_cost(JobCosts(model, spec, **known), degrees, placements, cluster)


def placed(model, degrees, sites=("a",), recompute="none"):
    """Layers divided evenly over the stages, the ranks over `sites` in unbroken runs."""
    each, more = divmod(model.num_layers, degrees.num_stages)
    layers = [each + (stage < more) for stage in range(degrees.num_stages)]
    return place_evenly(
        [sites[rank * len(sites) // degrees.pipeline] for rank in range(degrees.pipeline)], layers, recompute
    )


def stage_cost(model, asked, at, place, num_layers, *, embedding=False, head=False, profile=None, calibration=None):
    """Costs of one stage that recomputes as the training asks, for which auto counts as none."""
    known = {} if calibration is None else {place.device.name: calibration}
    costs = JobCosts(model, asked, {} if profile is None else {place.device.name: profile}, known)
    recompute = "none" if asked.recompute == "auto" else asked.recompute
    return costs.stage(at, place, num_layers, recompute, embedding=embedding, head=head)
