"""Sailor's measured plans over unlike machines (eth-easl/sailor, MIT licence): its files as groups of replicas.

A plan has, for every stage, its layers and the machines of its replicas, ``[[[device, number, zone]], tensor degree]``.
The j-th replica of a stage sends to the j-th of the next, so each j is a group with a share of the batch as large as
the others'. The embedding and the head count as layers. Times of stages come from its tables of layers, bandwidths
between machines from its measurements; a machine is a site here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from farpipe.catalog import device_row
from farpipe.cost import JobCosts, Layout, Profile, import_sailor, place_evenly
from farpipe.cost.groups import ReplicaGroup, group_costs, group_reduces
from farpipe.errors import InputError
from farpipe.plan.blocking import blocking_sends
from farpipe.plan.groups import joined_s
from farpipe.schedule import peak_memory_bytes
from farpipe.schedule.library import order
from farpipe.simulate import simulate
from farpipe.spec import Cluster, LocalLink, Model, Site, SiteLink, Training
from farpipe.spec.written import WrittenDevice
from farpipe.strict import parse_json, read_text

DEVICES: Final = {"RTX-3090": "rtx-3090", "Titan-RTX": "titan-rtx", "RTX-2080": "rtx-2080-ti"}
"""Names of the catalogue; the RTX-2080 is taken for a Ti, as it has that one's 11 GiB."""
LATENCY_S: Final = 50e-6
"""Between machines of one room; its fits have none."""
CONTEXT_BYTES: Final = 2.7 * 2**30
"""Median of what was measured beyond the model's bytes, over the six plans on machines of eight: driver, NCCL,
allocator. Fitted to them, as for `published_steps.GH200_CONTEXT_BYTES`."""
COPIED: Final = ("N3_D1",)
"""Its measured figures are those of N6_D2, a plan with twice the replicas."""
NO_MEMORY: Final = ("N2_D1", "N2_D2")
"""Rows whose stated allocation is less than what Sailor's own table has for the activations alone."""


@dataclass(frozen=True)
class SailorPlan:
    """One plan with what was measured of it."""

    name: str
    model: Model
    training: Training
    cluster: Cluster
    groups: tuple[ReplicaGroup, ...]
    profiles: Mapping[str, Profile]
    step_s: float
    memory_bytes: float | None
    """The most that a device had allocated; None where the figure is not to be had."""

    def __str__(self) -> str:
        return f"{self.model.name} {self.name}: " + " + ".join(map(_describe, self.groups))


def _describe(group: ReplicaGroup) -> str:
    return f"p{group.layout.pipeline} t{group.layout.tensor}"


def load_sailor_plans(folder: Path | str) -> list[SailorPlan]:
    """The plans in ``validation/mit`` of Sailor's folder, by name; empty where it has none.

    InputError where a table is missing or damaged.
    """
    base = Path(folder)
    rates = _rates(base)
    return [_plan(base, path, rates) for path in sorted((base / "validation" / "mit").rglob("*.json"))]


def _rates(base: Path) -> Mapping[str, Any]:
    """Bytes per second by device and number of devices of the sender, then of the receiver."""
    path = base / "providers" / "multizone_bandwidths_het.json"
    zones: Mapping[str, Any] = parse_json(read_text(path), str(path)) if path.is_file() else {}
    return dict(zones.get("us-central1-a", {}))


def _plan(base: Path, path: Path, rates: Mapping[str, Any]) -> SailorPlan:
    plan, name = parse_json(read_text(path), str(path)), path.stem.removeprefix("plan_config_")
    pipeline = plan["pipeline_list"][0]
    machines = [[(one[0][0][0], int(one[1])) for one in stage] for stage in pipeline["tmp_per_stage"]]
    layers = [len(stage) for stage in pipeline["layers_per_stage"]]
    layers[0] -= 1
    layers[-1] -= 1
    model, training = _model(), _training(plan["mbs"], plan["gbs"])
    count, rest = divmod(plan["gbs"], plan["mbs"] * len(machines[0]))
    if rest or len({len(stage) for stage in machines}) > 1:
        raise InputError(f"{path}: its replicas do not have equal shares of the batch")
    groups = [_group([stage[j] for stage in machines], j, layers, plan["mbs"], count) for j in range(len(machines[0]))]
    return SailorPlan(
        name=name,
        model=model,
        training=training,
        cluster=_cluster(machines, rates, path),
        groups=tuple(groups),
        profiles=_profiles(base, model, training, {one for stage in machines for one in stage}),
        step_s=plan["real"],
        memory_bytes=None if name in NO_MEMORY else float(plan["max_mem"]),
    )


def _model() -> Model:
    return Model(
        name="OPT-350M",
        num_layers=24,
        hidden=1024,
        num_heads=16,
        ffn_hidden=4096,
        gated_mlp=False,
        vocab_size=50272,
        tied_embeddings=False,
        norm="layernorm",
        positions="learned",
        max_sequence_length=2048,
        bias=True,
    )


def _training(microbatch_size: int, global_batch: int) -> Training:
    return Training(
        sequence_length=2048,
        global_batch=global_batch,
        microbatch_size=microbatch_size,
        precision="fp32",
        recompute="none",
        zero=0,
        flash_attention=False,
        overlap=False,
        sequence_parallel=False,
    )


def _group(machines: Sequence[tuple[str, int]], j: int, layers: Sequence[int], size: int, count: int) -> ReplicaGroup:
    degrees = {tensor for _, tensor in machines}
    assert len(degrees) == 1, "Sailor's measured plans have one tensor degree"
    layout = Layout(len(machines), 1, degrees.pop(), 1, size, count)
    return ReplicaGroup(layout, place_evenly([f"m{s}-{j}" for s in range(len(machines))], layers))


def _cluster(machines: Sequence[Sequence[tuple[str, int]]], rates: Mapping[str, Any], path: Path) -> Cluster:
    named = {f"m{s}-{j}": one for s, stage in enumerate(machines) for j, one in enumerate(stage)}
    links = [
        SiteLink(source=a, target=b, latency_s=LATENCY_S, bandwidth_bytes_per_s=_rate(rates, here, there, path))
        for a, here in named.items()
        for b, there in named.items()
        if a != b
    ]
    return Cluster(sites=tuple(_site(name, *one) for name, one in named.items()), links=tuple(links))


def _rate(rates: Mapping[str, Any], here: tuple[str, int], there: tuple[str, int], path: Path) -> float:
    """Its figure for one direction, or the other's where it has that alone."""
    for (device, number), (other, count) in ((here, there), (there, here)):
        try:
            return float(rates[device][str(number)]["us-central1-a"][other][str(count)][1])
        except KeyError:
            continue
    raise InputError(f"{path}: no bandwidth between {here[0]} and {there[0]} is in providers/multizone_bandwidths_het")


def _site(name: str, device: str, number: int) -> Site:
    inside = device_row(DEVICES[device]).machine_link
    link = LocalLink(latency_s=inside.latency_s, bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s)
    preset = WrittenDevice(preset=DEVICES[device]).resolve()
    return Site(
        name=name,
        device=preset,
        num_devices=number,
        devices_per_machine=number,
        machine_link=link,
        site_link=link,
    )


def _profiles(base: Path, model: Model, training: Training, machines: set[tuple[str, int]]) -> dict[str, Profile]:
    tables = base / "profiles_tmp.json"
    found = [
        import_sailor(tables, "OPT-350", device, model, training, DEVICES[device], tensor)
        for device, tensor in sorted(machines)
    ]
    return {profile.key: profile for profile in found}


def predict_plan(plan: SailorPlan) -> tuple[float, float]:
    """Seconds of a step under DeepSpeed's 1F1B, and bytes of the fullest device."""
    costs = JobCosts(plan.model, plan.training, plan.profiles)
    steps = group_costs(costs, plan.groups, plan.cluster)
    problems = [blocking_sends(step.problem) for step in steps]
    orders = [order("1f1b", problem) for problem in problems]
    timelines = [simulate(*pair) for pair in zip(problems, orders, strict=True)]
    makespan_s = joined_s(timelines, group_reduces(costs, plan.groups, plan.cluster))
    memory = max(max(peak_memory_bytes(*pair)) for pair in zip(problems, orders, strict=True))
    return makespan_s + max(step.overhead_s for step in steps), memory + CONTEXT_BYTES
