"""Small jobs for the planner's tests."""

from farpipe import planning
from farpipe.core.spec import Cluster, Device, Job, LocalLink, Model, Pins, Site, SiteLink, Training
from farpipe.planning.cost.chunk_profile import ChunkProfile
from farpipe.planning.cost.profile import model_shape
from farpipe.planning.explain import explained

MODEL = Model(name="small", num_layers=8, hidden=1024, num_heads=16, num_kv_heads=4, ffn_hidden=4096, vocab_size=32000)
TRAINING = Training(sequence_length=1024, global_batch=16, precision="bf16", zero1=False, sequence_parallel=False)


def device(name="a100-80gb", memory_gib=80.0, flops=312e12):
    """An A100, or one with another memory or speed."""
    return Device(
        name=name,
        peak_flops={"bf16": flops},
        memory_bytes=memory_gib * 2**30,
        memory_bandwidth_bytes_per_s=2e12 * flops / 312e12,
    )


def site(name, num_devices=4, on=None):
    """A site with one machine."""
    return Site(
        name=name,
        device=on or device(),
        num_devices=num_devices,
        devices_per_machine=num_devices,
        machine_link=LocalLink(latency_s=5e-6, bandwidth_bytes_per_s=3e11),
        site_link=LocalLink(latency_s=1e-5, bandwidth_bytes_per_s=2.5e10),
    )


def both_ways(one, other, latency_s=0.01, gbit_per_s=100.0):
    """Two directed links."""
    rate = gbit_per_s * 1e9 / 8
    return tuple(
        SiteLink(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=rate)
        for a, b in ((one, other), (other, one))
    )


def job(places=None, links=(), training=TRAINING, schedule=None, **pins):
    """A job with the given parts."""
    cluster = Cluster(sites=tuple(places or [site("a")]), links=tuple(links))
    return Job(model=MODEL, training=training, cluster=cluster, layout=Pins(**pins), schedule=schedule)


def measured_chunks(request):
    """A profile of chunks of the request's model on its device, slower than the cost model has it."""
    law = {"pair_s": 1e-9, "token_s": 1e-5, "fixed_s": 1e-3}
    part = {"forward": law, "backward": law, "held_bytes": 8.0}
    sizes = {"recomputed_bytes": 1.0, "boundary_bytes": 1.0, "action_forward_s": 0.0, "action_backward_s": 0.0}
    of = {"device": request.cluster.sites[0].device.name, "shape": model_shape(request.model), "errors": {}}
    asked = {"precision": request.training.precision, "longest": request.training.sequence_length}
    return ChunkProfile(**of, **asked, **sizes, embedding=part, layer=part, head=part)


def planned(asked, profiles=()):
    """The plan of a job with its explanation."""
    return explained(planning.find(asked, profiles)[0])


def why(asked, profiles=()):
    """The explanation of a job's plan."""
    return planned(asked, profiles).explanation
