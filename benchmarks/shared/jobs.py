"""Jobs as TOML, from the few figures that the benchmarks of the planner vary."""

from collections.abc import Sequence


def job_head(model: str, length: int, batch: int, sites: Sequence[int], device: str, training: str) -> str:
    """Model, training and sites ``s0``, ``s1``, ... of a job; the links are the caller's."""
    text = f'[model]\npreset = "{model}"\n[training]\nsequence_length = {length}\nglobal_batch = {batch}\n{training}\n'
    for index, count in enumerate(sites):
        text += f'[[cluster.sites]]\nname = "s{index}"\ndevice = "{device}"\nnum_devices = {count}\n'
    return text


def two_sites(one: str, other: str, num_devices: int, latency: str = "20 ms", bandwidth: str = "200 Mbit/s") -> str:
    """Tables of two sites of CPUs and of the link between them."""
    sites = [
        f'[[cluster.sites]]\nname = "{name}"\ndevice = "cpu"\nnum_devices = {num_devices}\n' for name in (one, other)
    ]
    link = f'[[cluster.links]]\nbetween = ["{one}", "{other}"]\nlatency = "{latency}"\nbandwidth = "{bandwidth}"\n'
    return "".join([*sites, link])
