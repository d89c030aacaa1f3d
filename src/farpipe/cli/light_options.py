"""The options that commands about trainings over light paths share, and what they stand for."""

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpipe.cli.optical_blocking import Guard, Modulation, Network, PathsFile, SlotGhz, Slots, net_called
from farpipe.cli.options import Given, refuse, settings, typed
from farpipe.cli.output import log
from farpipe.core.errors import UsageError
from farpipe.core.units import counted, format_seconds

if TYPE_CHECKING:
    from farpipe.optical.light_setting import LightSetting, Loaded
    from farpipe.optical.settings import LightSettings

Nodes = Annotated[
    str | None,
    typer.Option(help="The node of every rank, in order: 'a,b,c'; or of every site: 'zurich=a,lugano=b'."),
]
Placements = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of random placements, instead of named nodes; ranks with one name in --nodes share a node.",
    ),
]
Order = Annotated[
    str | None, typer.Option(help="A named schedule, or joint: chosen with the network; default: the plan's, or joint.")
]
Load = Annotated[float, typer.Option(min=0, help="Background traffic in Erlang; 0: none.")]
Trace = Annotated[Path | None, typer.Option(help="Background instead: CSV request,arrival_s,src,dst,gbit_s,holding_s.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps that count.")]


@dataclass(frozen=True)
class LightOptions:
    """A training's places and order, the network with its background, and how light paths are asked for."""

    nodes: Nodes = None
    placements: Placements = None
    network: Network = "nsfnet"
    method: Order = None
    slots: Slots = 80
    slot_ghz: SlotGhz = 12.5
    guard: Guard = 1
    modulation: Modulation = "gnpy"
    paths: PathsFile = None
    load: Load = 60.0
    trace: Trace = None
    steps: Steps = 3
    given: Given = None

    def __post_init__(self) -> None:
        if self.paths is not None and (self.settings.k or self.settings.by):
            raise UsageError("--set k and by are for paths that farpipe finds; --paths gives them")

    @property
    def inputs(self) -> tuple[Path | None, ...]:
        """Files that the options may name."""
        named = (self.network, self.modulation, self.settings.trace_modulation)
        return (self.paths, self.trace, *(Path(name) for name in named if name))

    @cached_property
    def settings(self) -> "LightSettings":
        """The settings that `--set` names."""
        from farpipe.optical.settings import LightSettings

        return settings(LightSettings, self.given)

    @cached_property
    def setting(self) -> "LightSetting":
        """The same for `farpipe.optical`."""
        from farpipe.optical.light_setting import LightSetting

        keys = {one.name for one in fields(LightSetting)} - {"network", "settings", "order"}
        net = net_called(self.network, shared=not self.settings.directed)
        return LightSetting(
            network=net, settings=self.settings, order=self.method, **{key: getattr(self, key) for key in keys}
        )

    def expect_one_source(self, context: typer.Context) -> None:
        """UsageError for options of random draws beside a trace, or beside placements, of which each has one."""
        if self.trace is not None:
            random = [f"--set {name}" for name in ("mean_holding", "rates") if name in self.settings.model_fields_set]
            refuse(typed(context, seeds="--seeds", load="--load") + random, "is for random traffic, not for a trace")
        elif self.settings.trace_modulation is not None:
            refuse(["--set trace_modulation"], "is of the requests of --trace: give that too")
        if self.placements is not None:
            refuse(typed(context, seeds="--seeds"), "is for one placement: of several each has a background of its own")


def without_collectives(loaded: "Loaded") -> "Loaded":
    """The same step with its messages alone; a line on stderr says what is left out."""
    from farpipe.core.simulate import simulate
    from farpipe.optical.transfers import messages_alone

    problem, schedule, plan = loaded
    if not problem.collectives:
        return loaded
    alone = messages_alone(problem)
    left_out = f"left out: {counted(len(problem.collectives), 'collective')} inside sites, which no light path carries"
    if schedule is not None:
        whole_s, alone_s = (simulate(one, schedule).makespan_s for one in (problem, alone))
        left_out += f"; in the plan they take {format_seconds(whole_s - alone_s)} of {format_seconds(whole_s)}"
    log(left_out)
    return alone, schedule, plan
