"""Jobs as TOML, from the few figures that the benchmarks of the planner vary."""

from collections.abc import Sequence


def job_head(model: str, length: int, batch: int, sites: Sequence[int], device: str, training: str) -> str:
    """Model, training and sites ``s0``, ``s1``, ... of a job; the links are the caller's."""
    text = f'[model]\npreset = "{model}"\n[training]\nsequence_length = {length}\nglobal_batch = {batch}\n{training}\n'
    return text + "".join(site_table(f"s{index}", device, count) for index, count in enumerate(sites))


def site_table(name: str, device: str, num_devices: int) -> str:
    """A site's table."""
    return f'[[cluster.sites]]\nname = "{name}"\ndevice = "{device}"\nnum_devices = {num_devices}\n'


def link_table(one: str, other: str, latency: str, bandwidth: str) -> str:
    """The table of the link between two sites."""
    return f'[[cluster.links]]\nbetween = ["{one}", "{other}"]\nlatency = "{latency}"\nbandwidth = "{bandwidth}"\n'


def two_sites(one: str, other: str, num_devices: int, latency: str = "20 ms", bandwidth: str = "200 Mbit/s") -> str:
    """Tables of two sites of CPUs and of the link between them."""
    sites = [site_table(name, "cpu", num_devices) for name in (one, other)]
    return "".join([*sites, link_table(one, other, latency, bandwidth)])
