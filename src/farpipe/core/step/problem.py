"""One optimizer step as numbers: durations, bytes, memory limits and links.

A Problem knows nothing of models, GPUs or datacenters. It is the upper half of farpipe's waist: planners write
it, schedulers, the simulator and the runtime read it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from farpipe.core.document import Document
from farpipe.core.step.chains import Chains, chains, expect_chains
from farpipe.core.step.figures import (
    MAX_SECONDS,
    LinkNames,
    NonNegative,
    PerMicrobatch,
    ProblemPart,
    SecondsPerMicrobatch,
)
from farpipe.core.step.links import Collective, Exchange, Hop, Link, Sync, Transfer, collectives
from farpipe.core.step.messages import StepTraffic, traffic
from farpipe.core.strict import nearest, validate
from farpipe.core.units import format_bytes, format_rate, format_seconds

T = TypeVar("T")

MAX_MICROBATCHES: Final = 1 << 20
STAGE_FIGURES: Final = (
    "forward_s",
    "input_grad_s",
    "weight_grad_s",
    "activation_bytes",
    "weight_stash_bytes",
    "chain_bytes",
)
"""Figures of a Stage that may differ per microbatch."""


class Rank(ProblemPart):
    """A process, one position of the pipeline. `memory_bytes` None: unlimited."""

    memory_bytes: NonNegative | None = None
    static_bytes: NonNegative = 0.0
    """Parameters, gradients, optimizer state: what is there during the whole step."""


class Stage(ProblemPart):
    """A slice of the model on one rank."""

    rank: Annotated[int, Field(ge=0)]
    forward_s: SecondsPerMicrobatch
    input_grad_s: SecondsPerMicrobatch
    weight_grad_s: SecondsPerMicrobatch
    activation_bytes: PerMicrobatch = 0.0
    """Held from the start of F to the end of I or B."""
    weight_stash_bytes: PerMicrobatch = 0.0
    """The part of it that remains after I, until the end of W."""
    chain_bytes: PerMicrobatch = 0.0
    """Gradients of keys and values: held from the start of the chain's first backward to the end of the own one."""


class Problem(Document, ProblemPart):
    """One optimizer step of a pipeline: `num_microbatches` through `stages`, which live on `ranks`.

    Of several replicas of the pipeline it describes one, for they are identical. On a link that they share, either they
    send together: then a message carries the bytes of all of them; or they are staggered (`Link.num_staggered`): then
    it carries this replica's bytes at the full rate, and the link is taken for the others' messages as well.
    """

    FORMAT: ClassVar[str] = "farpipe/problem/1"

    num_microbatches: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)]
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1)]
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    links: dict[str, Link] = Field(default_factory=dict)
    hops: tuple[Hop | None, ...] = ()
    """Hop from stage s to s + 1; None: tensors are there at once. Left out: none between any two."""
    sync: tuple[Sync | None, ...] | None = None
    exchanges: Annotated[tuple[Exchange, ...], Field(exclude_if=lambda exchanges: not exchanges)] = ()
    """Exchanges between stages, after the last backward of each; with `sync` they make `collectives`."""
    follows: tuple[int | None, ...] | None = None
    """Microbatch that is the slice before each of the same sequence, if any; None: no chains."""

    barrier: Annotated[bool, Field(exclude_if=lambda on: on)] = True
    """All ranks end a step together; without, orders are made for their period, and the makespan comes second."""

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        """JSON has lists where Python has tuples; strict mode distinguishes them. Hops may be left out."""
        if not isinstance(data, dict):
            return data
        if "hops" not in data and isinstance(data.get("stages"), list | tuple):
            data = data | {"hops": (None,) * max(0, len(data["stages"]) - 1)}
        keys = ("ranks", "stages", "hops", "sync", "exchanges", "follows")
        return data | {key: tuple(data[key]) for key in keys if isinstance(data.get(key), list)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.hops) != len(self.stages) - 1:
            raise ValueError(
                f"hops: expected one entry per adjacent stage pair, {len(self.stages) - 1}, found {len(self.hops)}"
            )
        if self.sync is not None and len(self.sync) != len(self.stages):
            raise ValueError(f"sync: expected one entry per stage, {len(self.stages)}, found {len(self.sync)}")
        if self.follows is not None:
            expect_chains(self.follows, self.num_microbatches)
        for index, stage in enumerate(self.stages):
            if stage.rank >= len(self.ranks):
                raise ValueError(f"stages[{index}].rank: there is no rank {stage.rank}; ranks: {len(self.ranks)}")
            for name in STAGE_FIGURES:
                self._expect_length(getattr(stage, name), f"stages[{index}].{name}")
        self._expect_exchanges()
        self._expect_transfers()
        self._expect_equal_stagger()
        return self

    def _expect_exchanges(self) -> None:
        count = len(self.stages)
        for index, exchange in enumerate(self.exchanges):
            for name in ("source_stage", "target_stage"):
                if (stage := getattr(exchange, name)) >= count:
                    raise ValueError(f"exchanges[{index}].{name}: there is no stage {stage}; stages: {count}")
            if exchange.source_stage == exchange.target_stage:
                raise ValueError(f"exchanges[{index}].target_stage: must be another stage than source_stage")

    def _expect_transfers(self) -> None:
        for place, transfer in self.transfers():
            figures = (transfer.link, transfer.bytes, transfer.occupies_s, transfer.arrives_after_s)
            if not place.startswith("hops") and any(isinstance(figure, tuple) for figure in figures):
                raise ValueError(f"{place}: a collective has no microbatches: give one link and one number of bytes")
            for name in ("bytes", "occupies_s", "arrives_after_s"):
                self._expect_length(getattr(transfer, name), f"{place}.{name}")
            self._expect_links(transfer.link, f"{place}.link")
            for name, share in self.shares(transfer):
                if not float(share.max()) <= MAX_SECONDS * self.links[name].bandwidth_bytes_per_s:
                    raise ValueError(f"{place}.bytes: would take more than {MAX_SECONDS:g} s on link {name!r}")

    def _expect_equal_stagger(self) -> None:
        """The same replicas are staggered everywhere; a collective, which they share, would upset private links."""
        counts = {name: link.num_staggered for name, link in self.links.items() if link.num_staggered > 1}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"links: the same replicas are staggered everywhere: num_staggered must be equal, found {counts}"
            )
        if counts:
            for name in self.mixed_links:
                if name not in counts:
                    raise ValueError(
                        f"links.{name}.num_staggered: where replicas are staggered on any link, they must be on those "
                        f"that carry both messages and collectives; expected {max(counts.values())}, found 1"
                    )

    @property
    def mixed_links(self) -> tuple[str, ...]:
        """The links that carry both messages and collectives."""
        hops = [one for hop in self.hops if hop is not None for one in (hop.forward, hop.backward) if one is not None]
        messages = {name for transfer in hops for name in transfer.links}
        others = {name for one in self.collectives for name in one.transfer.links}
        return tuple(name for name in self.links if name in messages and name in others)

    def changed(self, **fields: Any) -> Self:
        """The same step with other `fields`, checked again; a copy would keep the old one's cached results."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | fields)

    def part(self, microbatches: slice) -> Self:
        """The step of some of its microbatches: messages keep their own figures, all else is alike in a plan's step."""

        def cut(transfer: Transfer | None) -> Transfer | None:
            own = {name: value[microbatches] for name, value in transfer or () if isinstance(value, tuple)}
            return transfer.model_copy(update=own) if transfer and own else transfer

        hops = tuple(hop and Hop.computed(forward=cut(hop.forward), backward=cut(hop.backward)) for hop in self.hops)
        count = len(range(self.num_microbatches)[microbatches])
        return self.model_copy(update={"num_microbatches": count, "hops": hops})

    def over(self, links: Mapping[str, Link], hops: Sequence[tuple[LinkNames, LinkNames] | None]) -> Self:
        """The same step with its messages over `links`, those named in `hops` (forward, backward), and no others.

        A hop that is None takes no time, nor does a direction that had no message. Collectives keep their links.
        """

        def on(transfer: Transfer | None, names: LinkNames) -> Transfer | None:
            return transfer and transfer.model_copy(update={"link": names})

        moved = tuple(
            hop and names and Hop(forward=on(hop.forward, names[0]), backward=on(hop.backward, names[1]))
            for hop, names in zip(self.hops, hops, strict=True)
        )
        changed, known = self.model_copy(update={"hops": moved}), {**self.links, **links}
        used = {name for _, transfer in changed.transfers() for name in transfer.links}
        return changed.model_copy(update={"links": {name: known[name] for name in known if name in used}})

    def _expect_length(self, value: float | str | tuple[Any, ...] | None, place: str) -> None:
        if isinstance(value, tuple) and len(value) != self.num_microbatches:
            raise ValueError(f"{place}: expected one entry per microbatch, {self.num_microbatches}, found {len(value)}")

    def _expect_links(self, names: str | tuple[str, ...], place: str) -> None:
        self._expect_length(names, place)
        for name in dict.fromkeys([names] if isinstance(names, str) else names):
            if name not in self.links:
                raise ValueError(f"{place}: there is no link {name!r}{nearest(name, self.links)}")

    def transfers(self) -> list[tuple[str, Transfer]]:
        """Every transfer of the step with its key path in the file."""
        found: list[tuple[str, Transfer | None]] = []
        for index, hop in enumerate(self.hops):
            if hop is not None:
                found += [(f"hops[{index}].forward", hop.forward), (f"hops[{index}].backward", hop.backward)]
        found += [(one.place, one.transfer) for one in self.collectives]
        return [(place, transfer) for place, transfer in found if transfer is not None]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of (virtual) stages over all ranks."""
        return len(self.stages)

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """Stages that live on every rank, ascending."""
        of_rank: list[list[int]] = [[] for _ in self.ranks]
        for index, stage in enumerate(self.stages):
            of_rank[stage.rank].append(index)
        return tuple(tuple(stages) for stages in of_rank)

    @cached_property
    def chains(self) -> Chains:
        """Microbatches that are slices of one sequence."""
        return chains(self.follows, self.num_microbatches)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives, with what they wait for and what waits for them: see `farpipe.core.step.links`."""
        return self.kept(_collectives)

    @cached_property
    def is_uniform(self) -> bool:
        """True if all microbatches are alike: no figure of a stage or a hop has one number for each, and no chains."""
        stages = (getattr(stage, name) for stage in self.stages for name in STAGE_FIGURES)
        return self.follows is None and not any(
            isinstance(figure, tuple) for figure in chain(stages, self._figures_of_hops())
        )

    def _figures_of_hops(self) -> Iterator[Any]:
        for hop in filter(None, self.hops):
            for one in filter(None, (hop.forward, hop.backward)):
                yield from (one.link, one.bytes, one.occupies_s, one.arrives_after_s)

    @cached_property
    def between_sites(self) -> dict[str, bool]:
        """True for every link that joins two sites."""
        return {name: link.is_between_sites(name) for name, link in self.links.items()}

    @cached_property
    def traffic(self) -> StepTraffic:
        """All messages and collectives: link, seconds on it, seconds until they are there."""
        return traffic(
            self.links, self.hops, self.collectives, [stage.rank for stage in self.stages], self.num_microbatches
        )

    def shares(self, transfer: Transfer) -> list[tuple[str, NDArray[np.float64]]]:
        """Bytes of the messages that take every link of a hop's transfer."""
        rows = self.row(transfer.bytes)
        if isinstance(transfer.link, str):
            return [(transfer.link, rows)]
        names = np.array(transfer.link)
        return [(name, rows[names == name]) for name in dict.fromkeys(transfer.link)]

    def table(self, figure: str) -> NDArray[np.float64]:
        """A stage figure (``"forward_s"``, ``"activation_bytes"``, ...) as an array [num_stages, num_microbatches].

        It is kept, and not to be written to.
        """
        if figure not in self._kept:
            figures = [getattr(stage, figure) for stage in self.stages]
            if any(isinstance(one, tuple) for one in figures):
                table = np.stack([self.row(one) for one in figures])
            else:  # as a rule; ten times as fast
                table = np.repeat(np.array(figures, np.float64)[:, None], self.num_microbatches, axis=1)
            table.setflags(write=False)
            self._kept[figure] = table
        kept: NDArray[np.float64] = self._kept[figure]
        return kept

    def kept(self, compute: "Callable[[Problem], T]") -> T:
        """Result of `compute` for this step, cached; read-only."""
        if compute not in self._kept:
            self._kept[compute] = compute(self)
        kept: T = self._kept[compute]
        return kept

    @cached_property
    def _kept(self) -> dict[object, Any]:
        return {}

    def row(self, value: float | Sequence[float]) -> NDArray[np.float64]:
        """A per-microbatch figure as an array [num_microbatches]."""
        if isinstance(value, float | int):
            return np.full(self.num_microbatches, float(value))  # ten times as fast as broadcasting
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (self.num_microbatches,))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy as pydantic's, without what was computed from the old values."""
        copied = super().model_copy(update=update, deep=deep)
        for name in ("stages_of_rank", "chains", "is_uniform", "between_sites", "traffic", "_kept"):
            copied.__dict__.pop(name, None)
        return copied

    def to_json(self) -> str:
        """The problem in its format; with chains only where there are any."""
        unused: dict[str, Any] = {} if self.follows is not None else {"follows": True}
        if all(stage.chain_bytes == 0 for stage in self.stages):  # a list of zeros is not left out
            unused["stages"] = {"__all__": {"chain_bytes"}}
        body = self.model_dump_json(exclude=unused)  # ten times as fast as through `to_body`
        return f'{{"format":"{self.FORMAT}",{body[1:]}'

    def to_body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.to_json())
        del body["format"]
        return body

    @classmethod
    def from_body(cls, body: dict[str, Any], source: str) -> Self:
        return validate(cls, body, source)

    def __repr__(self) -> str:
        lines = [f"Problem: {self.num_stages} stages on {self.num_ranks} ranks, {self.num_microbatches} microbatches"]
        lines += [f"  stage {index}: {_describe_stage(stage)}" for index, stage in enumerate(self.stages)]
        for index, rank in enumerate(self.ranks):
            if rank.memory_bytes is not None:
                free = rank.memory_bytes - rank.static_bytes
                lines.append(f"  rank {index}: {format_bytes(rank.memory_bytes)}, {format_bytes(free)} for activations")
        for name, link in self.links.items():
            staggered = f", {link.num_staggered} staggered replicas" if link.num_staggered > 1 else ""
            rate = format_rate(link.bandwidth_bytes_per_s)
            lines.append(f"  {name}: {format_seconds(link.latency_s)}, {rate}{staggered}")
        return "\n".join(lines)

    __str__ = __repr__


def _collectives(problem: Problem) -> tuple[Collective, ...]:
    return collectives(problem.sync or (), problem.exchanges)


def _describe_stage(stage: Stage) -> str:
    times = [f"{letter} {_span(getattr(stage, name))}" for letter, name in zip("FIW", STAGE_FIGURES, strict=False)]
    return f"rank {stage.rank}, " + ", ".join(times)


def _span(value: float | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return f"{format_seconds(min(value))}..{format_seconds(max(value))}"
    return format_seconds(value)
