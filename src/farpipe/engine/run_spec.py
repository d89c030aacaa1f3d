"""All that the ranks of a run read: its plan, and the settings of the run, ``farpipe/run/2``."""

import itertools
import math
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import InstanceOf, model_validator

from farpipe.core.document import Document
from farpipe.core.spec import LocalSteps
from farpipe.core.spec.part import fault
from farpipe.core.step import LightPaths, Link, Problem, Transfer
from farpipe.core.strict import expect_format, parse_json, read_text, validate
from farpipe.engine.bare_plan import BarePlan
from farpipe.engine.checkpoint.folders import CHECKPOINTS_NAME, site_folder
from farpipe.engine.figures.metrics import PLAN_NAME
from farpipe.engine.links import LinkShape, OwnPath
from farpipe.engine.replicas.places import Places
from farpipe.engine.run_settings import RunSettings
from farpipe.engine.site_plans import check_elastic, check_local_steps
from farpipe.engine.stages.hops_and_layers import check_partition, hop_links
from farpipe.planning import Plan
from farpipe.planning.cost.chunks import ChunkCosts


class Ends(NamedTuple):
    """Ranks between which the gradient of tied weights is exchanged, and links ("" if none is known)."""

    first_rank: int
    last_rank: int
    link_there: str = ""
    link_back: str = ""


class RunSpec(Document, RunSettings):
    """A run: a plan, and the settings with which its ranks run it.

    A Plan keeps its own file, ``plan.json`` beside ``run.json``; a BarePlan is part of ``run.json``.
    """

    FORMAT: ClassVar[str] = "farpipe/run/2"

    plan: InstanceOf[Plan] | InstanceOf[BarePlan]

    @classmethod
    def bare(cls, **fields: Any) -> Self:
        """A run without a planner's plan, from the fields of a BarePlan and the settings."""
        plan = BarePlan.model_validate({key: fields.pop(key) for key in [*fields] if key in BarePlan.model_fields})
        return cls.model_validate({**fields, "plan": plan})

    def with_plan(self, **changes: Any) -> Self:
        """The same run with other fields of its plan, which are not checked."""
        return self.model_copy(update={"plan": self.plan.model_copy(update=changes)})

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self._check_sync()
        for index, change in enumerate(self.link_changes):
            if not self.plan.problem.between_sites.get(change.link, False):
                raise fault(f"{change.link!r} is no link between sites of the run", "link_changes", index, "link")
        if self.light_paths is not None:
            self._check_light_paths(self.light_paths)
        if self.device != "sleep":
            self._check_training()
        if self.plan.training is not None and self.runs_by_site:
            check_sites = check_elastic if self.local_steps is None else check_local_steps
            check_sites(self, self.plan.training, self.places.replicas)
        if self.site_plans and self.local_steps is None:
            raise fault("sites have plans of their own with training.local_steps alone", "site_plans")
        return self

    def _check_light_paths(self, paths: LightPaths) -> None:
        """Fault unless light paths are of this step and order, on emulated links that nothing else changes."""
        paths.expect_fit(self.plan.problem, "light_paths")
        if paths.schedule.ranks != self.plan.schedule.ranks:
            raise fault("their messages were asked for in another order than that of the run", "light_paths")
        if not self.emulate_links or self.num_replicas > 1 or self.replan or self.link_changes or self.chunk_costs:
            raise fault(
                "they are for emulated links and one replica, without replan, link_changes and chunks", "light_paths"
            )
        emulated = {pair for pair, (_, shape) in self.links().items() if shape is not None}
        ranks = [stage.rank for stage in self.plan.problem.stages]
        for hop in paths.steps[0].hops:
            target = ranks[hop.stage + (1 if hop.direction == "forward" else -1)]
            if (ranks[hop.stage], target) not in emulated:
                raise fault(f"{hop.direction} from stage {hop.stage}: its ranks are at one site", "light_paths")

    def own_path(self, kind: str, step: int, stage: int, microbatch: int) -> OwnPath | None:
        """Path that a message of the light paths has for itself; None: it is no message between stages."""
        if self.light_paths is None or kind not in ("forward", "backward"):
            return None
        path = self.light_paths.of_step(step).path(kind, stage, microbatch)
        if path is None:
            return OwnPath(0.0, LinkShape(0.0, math.inf))
        return OwnPath(path.wait_s, LinkShape(path.latency_s, path.bandwidth_bytes_per_s))

    def _check_sync(self) -> None:
        """One replica: the ends' tied weights are exchanged, and what its processes share is theirs alone. Several:
        every stage is summed, and gathered with ZeRO-1."""
        found = self.plan.problem.collectives
        gathered, reduced, exchanged = (
            [one.stage for one in found if one.kind == kind] for kind in ("gather", "reduce", "exchange")
        )
        if self.num_replicas == 1:
            if (gathered or reduced) and self.plan.context == 1:
                raise fault("it has data-parallel collectives, but there is one replica", "problem")
            if exchanged not in ([], [0, self.plan.problem.num_stages - 1]) or (exchanged and self.ends is None):
                raise fault("it has exchanges that are not those of a matrix tied between the ends", "problem")
        elif exchanged:
            raise fault("several replicas exchange what is tied after the step; it must not have exchanges", "problem")
        elif found and self.device != "sleep" and self.plan.training is not None:
            stages = [*range(self.plan.problem.num_stages)]
            is_gathered = self.plan.training.zero == 1
            if reduced != stages or gathered != (stages if is_gathered else []):
                wanted = "a reduce and a gather" if is_gathered else "a reduce and no gather"
                raise fault(
                    f"several replicas and training.zero = {self.plan.training.zero}: every stage needs {wanted}",
                    "problem",
                )

    def _check_training(self) -> None:
        if self.plan.model is None or self.plan.training is None:
            missing = "model" if self.plan.model is None else "training"
            raise fault(f"needed to train on device {self.device!r}", missing)
        check_partition(self.plan.partition, self.plan.model, self.plan.problem.stages)
        self._check_sharing()
        if self.plan.recompute and len(self.plan.recompute) != self.plan.problem.num_stages:
            raise fault(
                f"expected one per stage, {self.plan.problem.num_stages}, found {len(self.plan.recompute)}", "recompute"
            )
        if self.chunk_costs is not None:
            self._check_chunks(self.chunk_costs)
            return
        size, num_microbatches = self.plan.training.microbatch_size, self.plan.problem.num_microbatches
        if size is None or size * num_microbatches * self.num_replicas != self.plan.training.global_batch:
            replicas = f" x {self.num_replicas} replicas" if self.num_replicas > 1 else ""
            raise fault(
                f"microbatch_size {size} x {num_microbatches} microbatches{replicas} is not global_batch "
                f"{self.plan.training.global_batch}",
                "training",
            )

    def _check_chunks(self, costs: ChunkCosts) -> None:
        """Steps that are planned one by one: the stages of the costs are those of the run."""
        if self.plan.data.packing is None or self.replan is not None:
            raise fault("it is for data.packing, where every step is planned, and without replan", "chunk_costs")
        ranks = [[stage.rank for stage in problem.stages] for problem in (costs.base, self.plan.problem)]
        if ranks[0] != ranks[1]:
            raise fault(f"its stages are on ranks {ranks[0]}, those of the problem on {ranks[1]}", "chunk_costs")
        if self.group_costs and (self.num_replicas, self.plan.tensor, costs.num_stages) != (1, 1, 1):
            raise fault("groups of processes share the chunks of one stage at one site, without tensor", "group_costs")

    @property
    def is_elastic(self) -> bool:
        """True if its sites may leave and return, each a run of its own."""
        return self.plan.training is not None and self.plan.training.elastic

    @property
    def local_steps(self) -> LocalSteps | None:
        """How sites that train by themselves exchange; None: all train each step together."""
        return None if self.plan.training is None else self.plan.training.local_steps

    @property
    def runs_by_site(self) -> bool:
        """True if each site is a run of its own, joined with the others by worlds that come and go."""
        return self.is_elastic or self.local_steps is not None

    @property
    def num_processes(self) -> int:
        """Processes of the run: every rank of the pipeline in every replica."""
        return self.places.num_processes

    @property
    def num_replicas(self) -> int:
        """Copies of the pipeline, each with its share of the batch."""
        return max(1, len(self.plan.replicas))

    @property
    def places(self) -> Places:
        """Mapping of processes to ranks and replicas."""
        return Places(self.plan.replicas or (self.plan.sites,), self.num_twins)

    @property
    def is_mirrored(self) -> bool:
        """True if every site keeps checkpoints of its own, whole ones."""
        return self.device != "sleep" and self.plan.training is not None and self.plan.training.mirror

    def checkpoints(self, run_dir: Path, process: int) -> Path:
        """Folder to which `process` writes checkpoints: that of its site where they are mirrored, or of all sites."""
        place = site_folder(run_dir, self.places.site(process)) if self.is_mirrored else run_dir
        return place / CHECKPOINTS_NAME

    def mirrored_to(self, site: str) -> tuple[int, ...]:
        """Processes elsewhere whose files `site` needs for whole checkpoints; with ZeRO-1 over sites those of all."""
        here = self.places.at(site)
        if self.has_gather(0):
            return tuple(process for process in range(self.num_processes) if process not in here)
        return self.places.missing_at(site)

    @property
    def num_twins(self) -> int:
        """Processes of one rank and replica, each with its part of the tokens between layers."""
        return 1 if self.device == "sleep" else self.plan.tensor * self.plan.context

    @property
    def num_sharing(self) -> int:
        """Replicas at one site that share every stage's weights by FSDP2: with ZeRO-2 and 3, twins, shared experts."""
        if self.plan.training is None or self.device == "sleep" or not self._shares_weights:
            return 1
        return len(self.places.sharing(0))

    @property
    def _shares_weights(self) -> bool:
        assert self.plan.training is not None
        return self.plan.training.zero in (2, 3) or self.num_twins > 1 or self.plan.expert > 1

    @property
    def is_divided(self) -> bool:
        """True if stages lie in a mesh of processes of their site: replicas that share weights, and twins."""
        return self.num_sharing * self.num_twins > 1

    def _check_sharing(self) -> None:
        """Fault unless replicas at one site can share weights as ZeRO-2 and 3 do."""
        assert self.plan.model is not None
        assert self.plan.training is not None
        if not self._shares_weights or self.num_replicas == 1:
            return
        sizes = {len(self.places.sharing(process)) for process in range(self.num_processes)}
        if len(sizes) > 1 or 0 in sizes:
            key = "zero" if self.plan.training.zero in (2, 3) else f"layout.{self.twin_key}"
            raise fault(
                f"{key} above 1 shares weights among the replicas at a site: as many at every site, and the same ones "
                f"at all sites that they have; say {key} = 1",
                "training",
            )

    @property
    def twin_key(self) -> Literal["tensor", "context", "expert"]:
        """The degree for which a rank has several processes."""
        return "tensor" if self.plan.tensor > 1 else "context" if self.plan.context > 1 else "expert"

    def has_gather(self, stage: int) -> bool:
        """True if the replicas of `stage` gather its weights when a step begins."""
        if self.num_replicas == 1 or self.device == "sleep":
            return self.num_replicas > 1 and transfer_of(self.plan.problem, "gather", stage) is not None
        return self.plan.training is not None and self.plan.training.zero == 1 and not self.is_divided

    def has_reduce(self, stage: int) -> bool:
        """True if the replicas of `stage` sum its gradient over farpipe's transport."""
        if self.device == "sleep":
            return self.num_replicas > 1 and transfer_of(self.plan.problem, "reduce", stage) is not None
        return self.num_replicas > self.num_sharing

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one step; 0 for a rehearsal without a model."""
        return 0 if self.plan.training is None else self.plan.training.tokens_per_step

    @property
    def trains_tied_matrix(self) -> bool:
        """True if embedding and head are one matrix, and it is not frozen."""
        training, model = self.plan.training, self.plan.model
        is_frozen = training is not None and training.lora is not None
        return model is not None and model.tied_embeddings and not is_frozen

    @property
    def ends(self) -> Ends | None:
        """The exchange of tied weights' gradients; None where nothing is tied or both ends are on one rank.

        With replicas it comes after their sums, when the Timeline has ended: a rehearsal leaves it out.
        """
        first, last = self.plan.problem.stages[0].rank, self.plan.problem.stages[-1].rank
        planned = bool(self.plan.problem.exchanges)
        tied = planned if self.plan.model is None or self.device == "sleep" else self.trains_tied_matrix
        if first == last or not tied:
            return None
        links, processes = self.links(), (self.places.process(first, 0), self.places.process(last, 0))
        there, back = (links.get(pair, ("", None))[0] for pair in (processes, processes[::-1]))
        return Ends(first, last, there, back)

    def links(self) -> dict[tuple[int, int], tuple[str, LinkShape | None]]:
        """(source process, target process) -> name of its link and, where it is to be emulated, what that link does.

        Processes at two sites that have no hop in common still share the sites' link, for control messages and what
        the replicas exchange. Twins send at the same time, each its part of a message: each pair has its part of the
        rate.
        """
        places, hops, own = self.places, hop_links(self.plan.problem), self.plan.sites
        found = [(*places.of(process)[:2], places.site(process)) for process in range(places.num_processes)]
        names: dict[tuple[int, int], str] = {}
        for pair in itertools.permutations(range(places.num_processes), 2):
            (source, one, here), (target, other, there) = (found[process] for process in pair)
            sites = here, there
            if one == other and (source, target) in hops and sites == (own[source], own[target]):
                names[pair] = hops[source, target]
            elif sites[0] != sites[1] and ">".join(sites) in self.plan.problem.links:
                names[pair] = ">".join(sites)
        return {pair: (name, self._shape(name)) for pair, name in names.items()}

    def links_to_subscribers(self) -> dict[tuple[int, int], tuple[str, LinkShape | None]]:
        """As `links`, from every process to the sites of the job that do not train, numbered after all processes.

        There nobody trains, but somebody may subscribe to the weights.
        """
        if self.publish is None or not self.emulate_links or not isinstance(self.plan, Plan):
            return {}
        used = {self.places.site(process) for process in range(self.num_processes)}
        others = [site.name for site in self.plan.job.cluster.sites if site.name not in used]
        found: dict[tuple[int, int], tuple[str, LinkShape | None]] = {}
        for process, (number, target) in itertools.product(range(self.num_processes), enumerate(others)):
            source = self.places.site(process)
            if (link := self.link_between(source, target)) is not None:
                shape = LinkShape(link.latency_s, link.bandwidth_bytes_per_s)
                found[process, self.num_processes + number] = f"{source}>{target}", shape
        return found

    def link_between(self, source: str, target: str) -> Link | None:
        """The link between two sites, of the step or else of the job; None where it is unknown, or inside a site."""
        link = self.plan.problem.links.get(f"{source}>{target}")
        if link is not None or not isinstance(self.plan, Plan):
            return link
        of_job = self.plan.job.cluster.link(source, target)
        if of_job is None:
            return None
        return Link(latency_s=of_job.latency_s, bandwidth_bytes_per_s=of_job.bandwidth_bytes_per_s)

    def peers_over(self, link: str, process: int) -> list[int]:
        """Processes to which `process` sends over `link`."""
        return [target for (source, target), (name, _) in self.links().items() if (source, name) == (process, link)]

    def rate_of(self, bandwidth_bytes_per_s: float) -> float:
        """Rate of one pair of processes on a link."""
        return bandwidth_bytes_per_s / self.num_twins

    def _shape(self, name: str) -> LinkShape | None:
        if not (self.emulate_links and self.plan.problem.between_sites[name]):
            return None
        link = self.plan.problem.links[name]
        return LinkShape(link.latency_s, self.rate_of(link.bandwidth_bytes_per_s))

    def to_body(self) -> dict[str, Any]:
        apart = {"plan", "chunk_costs", "group_costs", "light_paths", "site_plans"}
        body: dict[str, Any] = self.model_dump(mode="json", exclude=apart, exclude_none=True)
        costs: dict[str, Any] = {} if self.chunk_costs is None else {"chunk_costs": self.chunk_costs.to_data()}
        costs |= {"group_costs": [one.to_data() for one in self.group_costs]} if self.group_costs else {}
        lit = {} if self.light_paths is None else {"light_paths": self.light_paths.to_data()}
        costs |= {"site_plans": [plan.to_body() for plan in self.site_plans]} if self.site_plans else {}
        bare = {} if isinstance(self.plan, Plan) else {"plan": self.plan.to_body()}
        return {**body, **costs, **lit, **bare}

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        if isinstance(body.get("plan"), dict):
            body["plan"] = BarePlan.from_body(body["plan"], source)
        bodies = enumerate(body.get("site_plans", ()))
        body["site_plans"] = [BarePlan.from_body(one, f"{source}: site_plans[{i}]") for i, one in bodies]
        if body.get("chunk_costs") is not None:
            body["chunk_costs"] = ChunkCosts.from_data(body["chunk_costs"], f"{source}: chunk_costs")
        degrees = enumerate(body.get("group_costs", ()))
        body["group_costs"] = [ChunkCosts.from_data(one, f"{source}: group_costs[{i}]") for i, one in degrees]
        if body.get("light_paths") is not None:
            body["light_paths"] = LightPaths.from_data(body["light_paths"], f"{source}: light_paths")
        return validate(cls, body, source)

    @classmethod
    def load(cls, path: Path | str, plan: Plan | None = None) -> Self:
        """Read ``run.json``, and the plan beside it unless the caller has read that, or the run has a bare one."""
        path = Path(path)
        body = expect_format(parse_json(read_text(path), str(path)), cls.FORMAT, str(path))
        if "plan" not in body:
            body = {**body, "plan": plan or Plan.load(path.with_name(PLAN_NAME))}
        return cls.from_body(body, str(path))


class ReplicaCollective(NamedTuple):
    """One collective of the replicas of a stage in one step."""

    kind: Literal["gather", "reduce"]
    stage: int


def collectives_of(run: RunSpec, rank: int) -> list[ReplicaCollective]:
    """Collectives of the ranks at position `rank` in every step, in the order in which they report them."""
    if run.places.num_replicas == 1:
        return []
    stages = run.plan.problem.stages_of_rank[rank]
    gathers = [ReplicaCollective("gather", stage) for stage in stages if run.has_gather(stage)]
    return gathers + [ReplicaCollective("reduce", stage) for stage in stages if run.has_reduce(stage)]


def collective_link(problem: Problem, collective: ReplicaCollective) -> str:
    """The link that the Problem names for it, "" if none."""
    transfer = transfer_of(problem, collective.kind, collective.stage)
    return str(transfer.link) if transfer else ""


def transfer_of(problem: Problem, kind: str, stage: int) -> Transfer | None:
    """Return the Problem's transfer of a stage's collective, None if there is none."""
    return next((one.transfer for one in problem.collectives if (one.kind, one.stage) == (kind, stage)), None)
