"""Jobs to start from, and random ones."""

from hypothesis import strategies as st

from farpipe.core.spec import (
    Cluster,
    Data,
    Device,
    Job,
    LocalLink,
    Model,
    Pins,
    Prices,
    Site,
    SiteLink,
    Training,
)

SMALL_MODEL = """\
[model]
name = "small"
num_layers = 2
hidden = 32
num_heads = 4
ffn_hidden = 64
vocab_size = 256
"""

EIGHT_LAYERS = """\
[model]
num_layers = 8
hidden = 1024
num_heads = 16
ffn_hidden = 4096
vocab_size = 32000
"""

LATENT_EXPERTS = """\
hidden = 2048
num_heads = 16
head_dim = 128
ffn_hidden = 4096
vocab_size = 1024
experts = {num_experts = 8, per_token = 2, ffn_hidden = 1408, shared_ffn_hidden = 2816}
latent_attention = {kv_rank = 512, query_rank = 768, nope_dim = 128, rope_dim = 64, value_dim = 128}
"""
"""A model with experts and latent attention, but for its layers."""

MODEL_TO_SWEEP = """\
[model]
name = "small"
num_layers = 4
hidden = 512
num_heads = 8
num_kv_heads = 8
ffn_hidden = 2048
vocab_size = 32000
[training]
sequence_length = 512
global_batch = 8
"""
"""Model and training of a job whose inputs are varied."""


def site_text(name, num_devices=1, *, device="cpu"):
    """The table of a site."""
    return f'[[cluster.sites]]\nname = "{name}"\ndevice = "{device}"\nnum_devices = {num_devices}\n\n'


def link_text(one, other, latency, bandwidth):
    """The table of a link."""
    return f'[[cluster.links]]\nbetween = ["{one}", "{other}"]\nlatency = "{latency}"\nbandwidth = "{bandwidth}"\n'


def sites_text(one="zurich", other="lugano", *, device="cpu", num_devices=(1, 1)):
    """The tables of two sites."""
    return "".join(
        site_text(name, number, device=device) for name, number in zip((one, other), num_devices, strict=True)
    )


def cluster_text(one="zurich", other="lugano", *, latency="30 ms", bandwidth="200 Mbit/s", **sites):
    """The tables of two sites and of the link between them."""
    return sites_text(one, other, **sites) + link_text(one, other, latency, bandwidth)


OF_A_LOOP = f"""\
[model]
name = "small"
num_layers = 4
hidden = 256
num_heads = 8
ffn_hidden = 1024
vocab_size = 2048
[training]
sequence_length = 256
global_batch = 8
microbatch_size = 1
precision = "fp32"
{cluster_text("west", "east", latency="2 ms", bandwidth="400 Mbit/s")}
[layout]
sites = ["west", "east"]
virtual = 1
"""
"""A job whose plan runs under another framework's loop, with one stage on each rank."""

PLAIN = f"""\
[model]
preset = "llama-3-8b"

[training]
sequence_length = 4096
global_batch = 256

{cluster_text(device="h100", num_devices=(8, 16), latency="6 ms", bandwidth="100 Gbit/s")}
[layout]

[schedule]
"""


def changed(*replacements):
    """PLAIN with every (old, new) pair replaced once."""
    text = PLAIN
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def added(section, lines):
    """PLAIN with `lines` at the end of [section]."""
    return changed((f"[{section}]\n", f"[{section}]\n{lines}\n"))


positive = st.floats(1e-9, 1e18)
rates = st.floats(1, 1e18)
prices = st.builds(
    Prices,
    rent_usd_per_device_hour=st.none() | st.floats(0, 1e3),
    electricity_usd_per_mwh=st.none() | st.floats(-1e4, 1e4),
    pue=st.floats(1, 10),
    egress_usd_per_gb=st.none() | st.floats(0, 1),
)
words = st.text(min_size=1, max_size=10)


@st.composite
def models(draw):
    num_kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return Model(
        name=draw(words),
        num_layers=draw(st.integers(1, 64)),
        hidden=draw(st.integers(1, 64)) * num_kv_heads * group,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 64)),
        ffn_hidden=draw(st.integers(1, 4096)),
        gated_mlp=draw(st.booleans()),
        vocab_size=draw(st.integers(256, 100_000)),
        tied_embeddings=draw(st.booleans()),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        positions=draw(st.sampled_from(["rotary", "learned"])),
        max_sequence_length=4096,
        bias=draw(st.booleans()),
    )


@st.composite
def trainings(draw):
    microbatch_size = draw(st.integers(1, 8))
    return Training(
        sequence_length=draw(st.integers(1, 4096)),
        global_batch=microbatch_size * draw(st.integers(1, 64)),
        microbatch_size=draw(st.sampled_from([None, microbatch_size])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        zero1=draw(st.booleans()),
        learning_rate=draw(positive),
        betas=(draw(st.floats(0, 0.999)), draw(st.floats(0, 0.999))),
        clip_norm=draw(st.none() | positive),
    )


@st.composite
def sites(draw, name):
    local_links = st.builds(LocalLink, latency_s=st.floats(0, 1), bandwidth_bytes_per_s=rates)
    devices_per_machine = draw(st.integers(1, 8))
    return Site(
        name=name,
        device=Device(
            name=draw(words),
            peak_flops={precision: draw(positive) for precision in ("bf16", "fp16", "fp32")},
            memory_bytes=draw(st.floats(1e12, 1e15)),
            memory_bandwidth_bytes_per_s=draw(positive),
            power_w=draw(st.none() | positive),
        ),
        num_devices=devices_per_machine * draw(st.integers(1, 8)),
        devices_per_machine=devices_per_machine,
        machine_link=draw(local_links),
        site_link=draw(local_links),
        prices=draw(prices),
    )


@st.composite
def jobs(draw):
    names = draw(st.lists(st.sampled_from(["a", "b2", "Zürich", "x.y-z", "_"]), min_size=1, max_size=4, unique=True))
    pairs = [(source, target) for source in names for target in names if source != target]
    ends = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    links = [
        SiteLink(
            source=a,
            target=b,
            latency_s=draw(st.floats(0, 10)),
            bandwidth_bytes_per_s=draw(rates),
            queue_bytes=draw(st.none() | positive),
            loss=draw(st.floats(0, 0.99)),
            jitter_s=draw(st.floats(0, 1)),
            congestion_control=draw(st.sampled_from(["bbr", "cubic", "reno"])),
            egress_usd_per_gb=draw(st.none() | st.floats(0, 1)),
        )
        for a, b in ends
    ]
    places = tuple(draw(sites(name)) for name in names)
    return Job(
        model=draw(models()),
        training=draw(trainings()),
        cluster=Cluster(sites=places, links=tuple(links)),
        data=Data(source=draw(words)),
        layout=Pins(sites=draw(st.none() | st.just(tuple(reversed(names)))), pipeline=draw(st.none() | st.just(1)))
        if len(names) == 1
        else Pins(),
        schedule=draw(st.none() | st.sampled_from(["1f1b", "greedy"])),
    )
