"""Seconds of collectives, the effective links between ranks of one site, and bytes of messages between sites.

Ranks fill a site in pipeline order, each rank a block of data x tensor devices with the tensor-parallel ones next to
each other, as Megatron-LM orders them (arXiv 2104.04473, section 3). A ring's slowest part sets its pace: inside a
machine the machine's link; across machines all site links that the ring's members in one machine have together, if
that is less. Ring all-reduce moves 2 (n - 1)/n of the bytes through every device, reduce-scatter and all-gather half of
it (Patarasu and Yuan 2009); its latency is that of a tree, 2 log2 n steps, as NCCL chooses for short messages.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from farpipe.core.spec import LocalLink, Model, Site, Training, WireType
from farpipe.core.spec.model import Experts
from farpipe.core.step import occupied_s
from farpipe.planning.cost import memory
from farpipe.planning.cost.calibration import Calibration
from farpipe.planning.cost.layout import Layout

RingKind = Literal["all-reduce", "reduce-scatter", "all-gather"]

WIRE_ITEM_BYTES: Final[dict[WireType, int]] = {"bf16": 2, "fp8": 1, "int8": 1}
WIRE_BLOCK: Final = 128
"""Numbers that share a scale of 4 bytes, but for bf16, which has none; that is 3 %."""
WIRE_HEAD_BYTES: Final = 4


@dataclass(frozen=True)
class EffectiveLink:
    """Link as one device, or one rank's devices together, can count on: latency and bandwidth as programs see them."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.latency_s + occupied_s(self, num_bytes)


def wire_bytes(count: int, item_bytes: int, wire_type: WireType, num_dimensions: int = 3) -> int:
    """Bytes between sites of a message of `count` numbers, each of `item_bytes` where it is made.

    What is narrowed describes itself: head, the sizes of its dimensions, scales, numbers (made by
    engine/executor/wire_types.py). Activations have three dimensions.
    """
    if wire_type == "none":
        return count * item_bytes
    num_scales = 0 if wire_type == "bf16" else math.ceil(count / WIRE_BLOCK)
    return WIRE_HEAD_BYTES + 8 * num_dimensions + 4 * num_scales + count * WIRE_ITEM_BYTES[wire_type]


def narrowed_bytes(num_bytes: float, training: Training) -> float:
    """Bytes on the link that `num_bytes` of activations become between sites."""
    item_bytes = memory.element_bytes(training.precision)
    return float(wire_bytes(round(num_bytes / item_bytes), item_bytes, training.wire_type))


def effective_machine_link(site: Site, calibration: Calibration) -> EffectiveLink:
    """Link from one device to another of its machine."""
    return _effective(site.machine_link, calibration.machine_link_fraction)


def effective_site_link(site: Site, calibration: Calibration) -> EffectiveLink:
    """Link from one device to a device of another machine of the site."""
    return _effective(site.site_link, calibration.site_link_fraction)


def _effective(link: LocalLink, fraction: float) -> EffectiveLink:
    return EffectiveLink(link.latency_s, link.bandwidth_bytes_per_s * fraction)


def ring_link(site: Site, calibration: Calibration, size: int, stride: int = 1) -> EffectiveLink:
    """The ring through `size` devices of a site, each `stride` after the one before: latency of a tree, bandwidth."""
    inside, across = effective_machine_link(site, calibration), effective_site_link(site, calibration)
    steps = 2 * math.ceil(math.log2(size)) if size > 1 else 0
    if size * stride <= site.devices_per_machine:
        return EffectiveLink(steps * inside.latency_s, inside.bandwidth_bytes_per_s / calibration.crowd(size * stride))
    neighbours = max(1, min(size, site.devices_per_machine // stride))
    bandwidth = min(inside.bandwidth_bytes_per_s, neighbours * across.bandwidth_bytes_per_s)
    return EffectiveLink(steps * across.latency_s, bandwidth)


def all_to_all_link(site: Site, calibration: Calibration, size: int, stride: int = 1) -> EffectiveLink:
    """Link of an all-to-all of `size` devices, each `stride` after the one before, for the whole buffer of one of them.

    Each device gets an equal part of the buffer, of which its owner keeps one. What stays in the machine and what
    leaves it, by each device's own port, move side by side.
    """
    inside, across = effective_machine_link(site, calibration), effective_site_link(site, calibration)
    near = max(1, min(size, site.devices_per_machine // stride))
    crowd = calibration.crowd(min(size * stride, site.devices_per_machine))
    slower = max(occupied_s(inside, (near - 1) * crowd), occupied_s(across, size - near))
    return EffectiveLink((across if size > near else inside).latency_s, size / slower if slower else math.inf)


def ring_bytes(kind: RingKind, num_bytes: float, size: int) -> float:
    """Bytes that every device of a ring sends for a buffer of `num_bytes`."""
    return (2 if kind == "all-reduce" else 1) * (size - 1) / size * num_bytes


def tensor_collective_s(site: Site, calibration: Calibration, layout: Layout, num_bytes: float) -> float:
    """One all-reduce of `num_bytes` over the tensor-parallel devices; with sequence parallelism the reduce-scatter and
    the all-gather in its place move as much (Korthikanti et al. 2022, section 4.2.2)."""
    if layout.tensor == 1:
        return 0.0
    effective = ring_link(site, calibration, layout.tensor)
    return calibration.collective_start_s + effective.seconds(ring_bytes("all-reduce", num_bytes, layout.tensor))


def context_exchange_s(site: Site, calibration: Calibration, layout: Layout, num_bytes: float) -> float:
    """Sending `num_bytes` of keys and values on to every other context-parallel device in turn (ring attention, arXiv
    2310.01889)."""
    effective = ring_link(site, calibration, layout.context, layout.tensor)
    return calibration.collective_start_s + effective.seconds(
        ring_bytes("all-gather", num_bytes * layout.context, layout.context)
    )


def expert_exchange_s(
    site: Site, calibration: Calibration, layout: Layout, num_bytes: float, experts: Experts, *, once: bool = False
) -> float:
    """Each device's `num_bytes` of tokens on their way to their experts, over the expert-parallel devices.

    An all-to-all sends a copy for each expert. `once`: one for each device that a token reaches and, between machines,
    one for each machine, which hands it on (DeepEP, github.com/deepseek-ai/DeepEP). The own share stays.
    """
    size, stride = layout.expert, layout.expert_tensor
    if size == 1:
        return 0.0
    if not once:
        link = all_to_all_link(site, calibration, size, stride)
        return calibration.collective_start_s + link.seconds(num_bytes * experts.per_token)
    inside = _effective(site.machine_link, calibration.flex_link_fraction)
    across = effective_site_link(site, calibration)
    near = max(1, min(size, site.devices_per_machine // stride))
    machines = size / near
    there = (
        _reached(size, experts) * (near - 1) / near * calibration.crowd(min(size * stride, site.devices_per_machine))
    )
    far = _reached(machines, experts) * (machines - 1) / machines
    latency_s = (across if size > near else inside).latency_s
    slower = max(occupied_s(inside, there * num_bytes), occupied_s(across, far * num_bytes))
    return calibration.collective_start_s + latency_s + slower


def _reached(places: float, experts: Experts) -> float:
    """Expected number of different places of `places` that the experts of one token are at.

    All are equally likely inside the token's groups, and all groups are. A place is reached with a chance of
    ``1 - (1 - s)^k``, where s is the share of the chosen groups' experts that it holds.
    """
    copies, groups, chosen = experts.per_token, experts.num_groups, experts.group_topk
    if places >= groups:  # each place is inside one group
        inside = places * chosen / groups
        return inside * (1 - (1 - 1 / inside) ** copies)
    held = round(groups / places)
    chances = (
        math.comb(held, found) * math.comb(groups - held, chosen - found) * (1 - (1 - found / chosen) ** copies)
        for found in range(1, min(held, chosen) + 1)
    )
    return places * sum(chances) / math.comb(groups, chosen)


def head_exchange_link(site: Site, calibration: Calibration, context: int, tensor: int) -> EffectiveLink:
    """Link for `head_exchange_bytes` of `context` devices, each `tensor` after the one before: four all-to-alls, of
    queries, keys, values and what attention makes of them (DeepSpeed-Ulysses, arXiv 2309.14509)."""
    once = all_to_all_link(site, calibration, context, tensor)
    return EffectiveLink(4 * (calibration.collective_start_s + once.latency_s), once.bandwidth_bytes_per_s)


def head_exchange_bytes(model: Model, training: Training, tensor: int, tokens: float) -> float:
    """Bytes of one device's `tokens` in all four of Ulysses' all-to-alls of one layer's forward, or of its backward."""
    width, at = 2 * (model.attention_hidden + model.kv_hidden), model.latent_attention
    if at is not None:
        width = 2 * model.num_heads * (at.nope_dim + at.rope_dim + at.value_dim)
    return tokens * width / tensor * memory.element_bytes(training.precision)


def replica_link(site: Site, calibration: Calibration, layout: Layout) -> EffectiveLink:
    """The ring of the devices of a site that hold the same slice of the model."""
    return ring_link(site, calibration, layout.num_shares, layout.tensor)


def summed_over_groups_s(site: Site, calibration: Calibration, layout: Layout, size: int, num_bytes: float) -> float:
    """Seconds of the all-reduce of each device's part of `num_bytes`, over groups of `size` that hold a slice each."""
    groups = layout.num_shares // size
    if groups == 1:
        return 0.0
    across = ring_link(site, calibration, groups, size * layout.tensor)
    return across.seconds(ring_bytes("all-reduce", num_bytes / size, groups))


def expert_replica_link(site: Site, calibration: Calibration, layout: Layout) -> EffectiveLink:
    """The ring of the devices of a site that hold the same experts, as far apart as their experts are spread: where
    expert parallelism fills a machine, each device of it has a ring of its own over its own port."""
    return ring_link(site, calibration, layout.num_expert_shares, layout.expert * layout.expert_tensor)


def rank_link(site: Site, calibration: Calibration, layout: Layout, source: int, target: int) -> EffectiveLink:
    """Link between two ranks of one site, given as places in it; the tensor-parallel devices send side by side."""
    size, machine = layout.devices_per_rank, site.devices_per_machine
    first, last = min(source, target) * size, (max(source, target) + 1) * size - 1
    effective = effective_machine_link if first // machine == last // machine else effective_site_link
    one = effective(site, calibration)
    return EffectiveLink(one.latency_s, one.bandwidth_bytes_per_s * layout.tensor * layout.context)
