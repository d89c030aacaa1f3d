"""Derivation of a predicted step: every second followed down to products, bytes and constants.

Nothing is computed a second time: each line holds figures that `farpipe.planning.cost` and the simulator add up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from farpipe.core.simulate import simulate
from farpipe.core.spec import Model, Site, Training
from farpipe.core.step import Problem, Stage, Transfer
from farpipe.core.units import counted, format_bytes, format_flops, format_percent, format_rate, format_seconds
from farpipe.planning.cost import JobCosts, Layout, Placement, StageCost, compute, flops, memory
from farpipe.planning.cost.exchange import Times
from farpipe.planning.cost.flops import Product
from farpipe.planning.cost.speed import Speed, core_speed, head_speed
from farpipe.planning.cost.stage import changes_stages
from farpipe.planning.cost.step import overhead_parts
from farpipe.planning.cost.transfer import ring_link
from farpipe.planning.explain.limits import breakdown_s
from farpipe.planning.planner.plan import Plan

Seconds = tuple[float, float, float]
"""Seconds of F, I and W."""
EXCHANGES: Final = ("context exchange", "tensor and expert exchange", "ZeRO")
"""Parts of a layer that are communication between the devices of one rank."""


@dataclass(frozen=True)
class DerivedQuantity:
    """One quantity of a derivation, `depth` levels below the whole of which it is a part."""

    depth: int
    what: str
    seconds: tuple[float, ...]
    """Seconds of the step alone, or of F, I and W."""
    how: str = ""
    """Figures that it is computed from."""


def costs_of(plan: Plan) -> JobCosts | None:
    """The costs that a plan was made with; None where its times are not those of its job alone: of a profile or of
    chunks."""
    costs = JobCosts(plan.job.model, plan.job.training)
    if plan.job.data.packing is not None:
        return None
    for index, stage in enumerate(plan.problem.stages):
        if not np.allclose(_seconds(_stage_cost(plan, costs, index)), _means(plan.problem, stage), rtol=1e-6):
            return None
    return costs


def _means(problem: Problem, stage: Stage) -> list[float]:
    return [
        float(problem.row(seconds).mean()) for seconds in (stage.forward_s, stage.input_grad_s, stage.weight_grad_s)
    ]


def parts_of_step(plan: Plan, costs: JobCosts) -> dict[str, float]:
    """Seconds of the predicted step by kind, whose sum is the step: mean over the ranks.

    ``collectives_in_layers`` are exposed inside F and I, and part of ``compute`` with `data.packing`; what links cost
    is how much faster the same order would be without.
    """
    expected = plan.prediction
    timeline = simulate(plan.problem, plan.schedule, checked=True)
    parts = breakdown_s(plan.problem, plan.schedule, timeline, expected.overhead_s)
    inside = _exchange_s(plan, costs) if plan.job.data.packing is None else 0.0
    late_s = expected.step_s - expected.overhead_s - timeline.makespan_s
    return {
        "compute": parts["computing"] - inside,
        "collectives_in_layers": inside,
        "bubble": parts["idle in the pipeline"],
        "exposed_inside_sites": parts["for the links inside sites"],
        "exposed_between_sites": parts["for the links between sites"] + (late_s if abs(late_s) > _ROUNDING_S else 0.0),
        "overhead": expected.overhead_s,
    }  # fmt: skip


def _exchange_s(plan: Plan, costs: JobCosts) -> float:
    """Seconds of collectives inside layers in one step, mean over the ranks; 0 where layers were measured whole."""
    total = 0.0
    for placement in plan.placements:
        layer = sum((_exchanges(parts).times(share) for share, _, parts in _layers(plan, costs, placement)), _ZERO)
        total += placement.num_layers * (layer.forward_s + layer.input_grad_s + layer.weight_grad_s)
    return total * plan.layout.num_microbatches / plan.layout.pipeline


_ROUNDING_S: Final = 1e-9
"""Seconds below which a difference of sums is taken for rounding."""
_ZERO: Final = Times(0.0, 0.0, 0.0)


def _exchanges(parts: dict[str, Times]) -> Times:
    return sum((times for name, times in parts.items() if name in EXCHANGES), _ZERO)


def _layers(plan: Plan, costs: JobCosts, placement: Placement) -> list[tuple[float, Model, dict[str, Times]]]:
    """Share, kind and parts of the layers of a stage; empty for a device that has a profile."""
    site = plan.job.cluster.site(placement.site)
    if site.device.name in costs.profiles:
        return []
    training = _training(plan, costs, placement)
    job = (training, plan.layout, site, costs.calibration(site))
    model = costs.model.with_dense_share(costs.model.dense_share(placement.first_layer, placement.end_layer))
    return [(share, kind, compute.layer_parts(kind, *job)) for share, kind in model.kinds()]


def _training(plan: Plan, costs: JobCosts, placement: Placement) -> Training:
    return costs.settled(plan.layout).model_copy(update={"recompute": placement.recompute})


def part_name(kind: str) -> str:
    """A part of the step in words: what links cost is another figure than the exposed waits of a Timeline, and what is
    idle without them another one than its bubble."""
    return kind.replace("_", " ").replace("exposed", "cost of links").replace("bubble", "idle in the pipeline")


def step_lines(plan: Plan, costs: JobCosts) -> Iterator[DerivedQuantity]:
    """The step from its whole to its parts: computing, waiting, what is outside the pipeline, and messages."""
    expected, order = plan.prediction, plan.schedule.method
    yield DerivedQuantity(0, "step", (expected.step_s,), "from one step's start to the next one's")
    kinds = parts_of_step(plan, costs)
    count = counted(plan.layout.num_microbatches, "microbatch")
    told = {
        "compute": f"{count}, mean over {counted(plan.layout.pipeline, 'rank')}; see the stages",
        "collectives_in_layers": "of tensor, context and expert parallelism, in F and I",
        "bubble": f"filling, draining and uneven stages of the order {order}, as played",
        "exposed_inside_sites": "how much faster this order would be if links inside sites cost nothing",
        "exposed_between_sites": "how much faster this order would be if links between sites cost nothing",
        "overhead": "outside the pipeline",
    }
    for kind, seconds in kinds.items():
        yield DerivedQuantity(1, part_name(kind), (seconds,), told[kind])
    for what, seconds in overhead_parts(costs, plan.layout, plan.placements, plan.job.cluster).items():
        if seconds:
            yield DerivedQuantity(2, what, (seconds,), _overhead_how(what, plan, costs))
    yield from _message_lines(plan.problem)


def _overhead_how(what: str, plan: Plan, costs: JobCosts) -> str:
    if not what.startswith("optimizer"):
        return ""
    num_bytes = memory.adam_bytes(costs.settled(plan.layout))
    return f"{num_bytes:g} bytes a parameter through the device's memory"


def _message_lines(problem: Problem) -> Iterator[DerivedQuantity]:
    """One message of each hop, equal ones once."""
    known = set[tuple[object, ...]]()
    for index, hop in enumerate(problem.hops):
        for direction, transfer in () if hop is None else (("forward", hop.forward), ("backward", hop.backward)):
            if transfer is None or not isinstance(transfer.link, str) or not isinstance(transfer.bytes, float):
                continue
            link = problem.links[transfer.link]
            key = (link.latency_s, link.bandwidth_bytes_per_s, transfer.bytes, direction)
            if key not in known:
                known.add(key)
                how = (
                    f"{transfer.link}: {format_bytes(transfer.bytes)} at {format_rate(link.bandwidth_bytes_per_s)} = "
                    f"{format_seconds(link.occupied_s(transfer.bytes))}, and {format_seconds(link.latency_s)} latency"
                )
                yield DerivedQuantity(
                    0, f"message {direction}, stage {index} to {index + 1}", (_there_s(problem, transfer),), how
                )


def _there_s(problem: Problem, transfer: Transfer) -> float:
    """Seconds of a message on its empty link."""
    assert isinstance(transfer.link, str)
    assert isinstance(transfer.bytes, float)
    own = transfer.arrives_after_s
    return own if isinstance(own, float) else problem.links[transfer.link].travel_s(transfer.bytes)


def stage_lines(plan: Plan, costs: JobCosts) -> Iterator[DerivedQuantity]:
    """F, I and W of one microbatch on every kind of stage, then of one layer on every kind of device."""
    stages, layers = dict[tuple[object, ...], list[int]](), dict[tuple[str, str], Placement]()
    last = len(plan.placements) - 1
    for index, placement in enumerate(plan.placements):
        device = plan.job.cluster.site(placement.site).device.name
        key = (device, placement.num_layers, placement.recompute, index == 0, index == last)
        stages.setdefault(key, []).append(index)
        layers.setdefault((device, placement.recompute), placement)
    for indices in stages.values():
        yield _stage_line(plan, costs, indices)
    for (device, _), placement in layers.items():
        yield from _layer_lines(plan, costs, placement, device)
    yield from _end_lines(plan, costs)


def _stage_line(plan: Plan, costs: JobCosts, indices: Sequence[int]) -> DerivedQuantity:
    index, last = indices[0], len(plan.placements) - 1
    placement = plan.placements[index]
    site = plan.job.cluster.site(placement.site)
    cost = _stage_cost(plan, costs, index)
    profile = costs.profiles.get(site.device.name)
    fixed_s = profile.action_overhead_s if profile else costs.calibration(site).action_overhead_s
    fixed_s += costs.calibration(site).stage_change_s * changes_stages(plan.job.training, plan.layout)
    ends = [*(["embedding"] if index == 0 else []), *(["head"] if index == last else [])]
    parts = [counted(placement.num_layers, "layer"), *ends, f"{format_seconds(fixed_s)} for each F and I"]
    return DerivedQuantity(0, f"stage {', '.join(map(str, indices))}", _seconds(cost), " + ".join(parts))


def _stage_cost(plan: Plan, costs: JobCosts, index: int) -> StageCost:
    placement, last = plan.placements[index], len(plan.placements) - 1
    return _cost(plan, costs, placement, placement.num_layers, embedding=index == 0, head=index == last)


def _cost(plan: Plan, costs: JobCosts, placement: Placement, num_layers: int, **ends: bool) -> StageCost:
    """Costs of a stage of so many layers where `placement` is; `ends`: ``embedding``, ``head``."""
    site = plan.job.cluster.site(placement.site)
    chosen = {"embedding": False, "head": False} | ends
    dense_share = costs.model.dense_share(placement.first_layer, placement.end_layer)
    return costs.stage(plan.layout, site, num_layers, placement.recompute, dense_share=dense_share, **chosen)


def _part_s(plan: Plan, costs: JobCosts, placement: Placement, num_layers: int = 0, **ends: bool) -> Seconds:
    """F, I and W of layers, or of an end of the model, without the fixed time of an action."""
    whole, fixed = _cost(plan, costs, placement, num_layers, **ends), _cost(plan, costs, placement, 0)
    forward_s, input_grad_s, weight_grad_s = (a - b for a, b in zip(_seconds(whole), _seconds(fixed), strict=True))
    return forward_s, input_grad_s, weight_grad_s


def _seconds(cost: StageCost | Times) -> Seconds:
    return cost.forward_s, cost.input_grad_s, cost.weight_grad_s


def _layer_lines(plan: Plan, costs: JobCosts, placement: Placement, device: str) -> Iterator[DerivedQuantity]:
    """One layer and its parts; for measured devices the profile's figures alone."""
    training = _training(plan, costs, placement)
    if device in costs.profiles:
        yield DerivedQuantity(0, f"layer on {device}", _part_s(plan, costs, placement, 1), _MEASURED)
        return
    site = plan.job.cluster.site(placement.site)
    recompute = "" if placement.recompute == "none" else f", recompute {placement.recompute}"
    for share, kind, parts in _layers(plan, costs, placement):
        experts = " with experts" if kind.experts else ""
        many = f"{format_percent(share)} of the layers" if share != 1 else ""
        yield DerivedQuantity(0, f"layer{experts} on {device}{recompute}", _seconds(sum(parts.values(), _ZERO)), many)
        at = _Layer(kind, training, plan.layout, site, costs)
        for name, times in parts.items():
            if any(_seconds(times)):
                yield DerivedQuantity(1, name, _seconds(times), at.how(name))
                yield from at.products() if name == "matrix products" else ()


def _end_lines(plan: Plan, costs: JobCosts) -> Iterator[DerivedQuantity]:
    """The embedding and the head, each where it is."""
    for name, placement in (("embedding", plan.placements[0]), ("head", plan.placements[-1])):
        site = plan.job.cluster.site(placement.site)
        seconds, is_measured = _part_s(plan, costs, placement, **{name: True}), site.device.name in costs.profiles
        at = _Layer(plan.job.model, _training(plan, costs, placement), plan.layout, site, costs)
        how = _MEASURED if is_measured else at.embedding_how() if name == "embedding" else ""
        yield DerivedQuantity(0, f"{name} on {site.device.name}", seconds, how)
        if name == "head" and not is_measured:
            yield from at.head(seconds)


_MEASURED: Final = "measured: the profile's own figures"


@dataclass(frozen=True)
class _Layer:
    """One layer on a device of a site, whose figures are told."""

    model: Model
    training: Training
    layout: Layout
    site: Site
    costs: JobCosts

    def how(self, name: str) -> str:
        """Figures that a part of the layer is computed from."""
        degrees = self.layout
        residual = format_bytes(memory.residual_bytes(self.model, self.training, degrees))
        told = {
            "matrix products": f"{memory.microbatch_tokens(self.training, degrees):,} tokens on a device",
            "adapters": f"rank {self.training.lora.rank}, bound by memory" if self.training.lora else "",
            "attention": self._attention_how(),
            "tensor and expert exchange": f"2 all-reduces of {residual} over {degrees.tensor} devices{self._rate()}",
            "waiting for the host": "kernels are launched more slowly than they run"
            if self.model.experts is None
            else "counts of tokens are asked for, or kernels launched more slowly than they run",
            "copies to the host": f"{self.training.cpu_offloading_num_layers} of {self.model.num_layers} layers, "
            "beyond what is hidden",
            "recomputed": f"recompute {self.training.recompute}",
            "ZeRO": f"stage {self.training.zero}, over {self.training.grouped(degrees.num_shares)} devices, "
            "beyond what is hidden",
        }
        return told.get(name, f"over {degrees.context} devices")

    def _attention_how(self) -> str:
        if not self.training.flash_attention:
            return "scores in memory"
        told = "causal half, scores stay on the chip"
        if not self.model.has_windows(self.training.sequence_length):
            return told
        share = format_percent(self.model.windowed_share, 0)
        return f"{told}, a window of {self.model.sliding_window:,} tokens in {share} of the layers"

    def _rate(self) -> str:
        if self.layout.tensor == 1:
            return ""
        link = ring_link(self.site, self.costs.calibration(self.site), self.layout.tensor)
        return f" at {format_rate(link.bandwidth_bytes_per_s)}"

    def products(self) -> Iterator[DerivedQuantity]:
        """Every matrix product, and the memory traffic between them."""
        calibration, training = self.costs.calibration(self.site), self.training
        speed = Speed.of(self.site.device, calibration, training.precision, training.matmul)
        whole = _seconds(compute.linear_times(self.model, training, self.layout, speed))
        products = compute.linear_products(self.model, training, self.layout)
        yield from self._parted(2, products, speed, whole, "traffic between products", _memory_rate(speed))

    def head(self, whole: Seconds) -> Iterator[DerivedQuantity]:
        """The logits' product, and the loss and exchanges that are the rest of the head's seconds."""
        calibration, tokens = self.costs.calibration(self.site), memory.microbatch_tokens(self.training, self.layout)
        speed = head_speed(self.training, self.site.device, calibration)
        modules = f" and {counted(n, 'module')} of multi-token prediction" if (n := self.model.mtp_num_layers) else ""
        passes = calibration.passes_of_loss(fused=self.training.cross_entropy_loss_fusion)
        how = f"{passes:g} passes over the logits in 32 bit {_memory_rate(speed)}{self._reduced()}"
        products = flops.head_linear(self.model, tokens, self.layout.tensor)
        yield from self._parted(1, products, speed, whole, f"loss{modules}", how)

    def embedding_how(self) -> str:
        """Figures of the embedding: rows looked up, and their gradients added up."""
        speed = core_speed(self.training, self.site.device, self.costs.calibration(self.site))
        rows = format_bytes(memory.residual_bytes(self.model, self.training, self.layout))
        return f"{rows} of rows, 2 passes in F and 3 in W {_memory_rate(speed)}{self._reduced()}"

    def _reduced(self) -> str:
        return "" if self.layout.tensor == 1 else f", and a reduction over {self.layout.tensor} devices{self._rate()}"

    def _parted(
        self, depth: int, products: tuple[Product, ...], speed: Speed, whole: Seconds, rest: str, how: str
    ) -> Iterator[DerivedQuantity]:
        """A line for each product, and one for what is left of `whole`."""
        frozen = self.training.lora is not None
        for product in products:
            shape = f"[{product.rows:g} x {product.depth:g}] x [{product.depth:g} x {product.columns:g}]"
            count = f"{product.count:g} times " if product.count != 1 else ""
            seconds = _seconds(compute.product_times((product,), speed, frozen=frozen))
            yield DerivedQuantity(depth, f"{count}{shape}", seconds, _roofline(product, speed))
        all_products = _seconds(compute.product_times(products, speed, frozen=frozen))
        left = tuple(a - b for a, b in zip(whole, all_products, strict=True))
        yield DerivedQuantity(depth, rest, left, how)


def _memory_rate(speed: Speed) -> str:
    return f"at {speed.bytes_per_s / 1e9:,.0f} GB/s of memory"


def _roofline(product: Product, speed: Speed) -> str:
    """Factors of the device's constants in the seconds of a product's forward."""
    if speed.product_s(product) > speed.multiply_s(product):
        return f"memory-bound: {format_bytes(product.elements * speed.element_bytes)} {_memory_rate(speed)}"
    reached = format_percent(speed.flops_per_s / speed.peak_flops_per_s, 0)
    return (
        f"{product.flops / 1e12:.3g} TFLOP at {reached} of {format_flops(speed.peak_flops_per_s)}, "
        f"x {speed.idle(product):.3f} for idle units, x {speed.drain(product):.3f} for filling tiles"
    )
