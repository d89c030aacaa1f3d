"""Groups of replicas that the user pins: pipelines over unlike sites, whose ranks may differ in their degrees."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from farpipe.spec.model import Model
from farpipe.spec.part import Count, Natural, Part, SiteName, fault
from farpipe.strict import nearest


class GroupPin(Part):
    """Replicas of the pipeline that are alike: the site, tensor and data degree of every rank, in pipeline order.

    A number for `tensor` or `data` counts for all ranks.
    """

    sites: Annotated[tuple[SiteName, ...], Field(min_length=1)]
    """The site of every rank; its devices are the rank's."""
    tensor: tuple[Count, ...]
    """Devices that share each layer."""
    data: tuple[Count, ...]
    """Replicas of every rank, which divide the sequences of each microbatch among them."""
    layers: Annotated[tuple[Natural, ...], Field(min_length=1)] | None = None
    """Layers of every rank; None leaves them to the planner."""
    num_microbatches: Count | None = None
    """Microbatches of the group in a step; None: as many as balance the groups."""

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or not isinstance(given.get("sites"), list | tuple):
            return given
        degrees = {key: given.get(key, 1) for key in ("tensor", "data")}
        each = {key: [d] * len(given["sites"]) if isinstance(d, int) else d for key, d in degrees.items()}
        return {**given, **each}

    @model_validator(mode="after")
    def _one_per_rank(self) -> Self:
        for key in ("tensor", "data", "layers"):
            figures = getattr(self, key)
            if figures is not None and len(figures) != len(self.sites):
                raise fault(f"expected one number for each of {len(self.sites)} ranks, found {len(figures)}", key)
        return self


def check_groups(groups: tuple[GroupPin, ...], pins: Mapping[str, Any], sites: Collection[str], model: Model) -> None:
    """Raise unless the groups fit the model and the cluster's `sites`; `pins` are the other keys of [layout]."""
    if not groups:
        raise fault("expected one group at least", "layout", "groups")
    for key, value in pins.items():
        if value is not None:
            raise fault("not beside layout.groups, which say it for every rank; leave it out", "layout", key)
    for index, group in enumerate(groups):
        _check_group(group, ("layout", "groups", index), sites, model)


def _check_group(group: GroupPin, place: tuple[str | int, ...], sites: Collection[str], model: Model) -> None:
    for rank, name in enumerate(group.sites):
        if name not in sites:
            raise fault(f"there is no site {name!r}{nearest(name, sites)}", *place, "sites", rank)
    for rank, tensor in enumerate(group.tensor):
        if model.num_heads % tensor or model.ffn_hidden % tensor:
            raise fault(
                f"{tensor} does not divide model.num_heads {model.num_heads} and model.ffn_hidden {model.ffn_hidden}",
                *(*place, "tensor", rank),
            )
    if group.layers is not None and sum(group.layers) != model.num_layers:
        raise fault(f"they sum to {sum(group.layers)}, the model has {model.num_layers} layers", *place, "layers")
