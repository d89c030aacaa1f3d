"""Arguments of a step by microbatch: given as such, or cut from a whole batch as torch's schedules do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from farpipe.errors import InputError


@dataclass(frozen=True)
class Microbatches:
    """Arguments of a step on one rank, by microbatch."""

    args: Sequence[tuple[Any, ...]]
    """Positional arguments of the first stage."""
    kwargs: Sequence[Mapping[str, Any]]
    """Keyword arguments, which every stage gets."""
    targets: Sequence[Any] | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    keep_outputs: bool = False
    """True if the last stage keeps what its module returns."""


def cut(number: int, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, **further: Any) -> Microbatches:
    """`number` microbatches of a whole batch, whose tensors are cut along the first dimension.

    InputError for a batch that has fewer rows.
    """
    cut_args, cut_kwargs = split_args_kwargs_into_chunks(args, kwargs, number) if args or kwargs else ((), ())
    targets = None if target is None else [one for (one,) in split_args_kwargs_into_chunks((target,), {}, number)[0]]
    return from_lists(number, cut_args or None, cut_kwargs or None, targets, **further)


def from_lists(
    number: int,
    args: Sequence[tuple[Any, ...]] | None,
    kwargs: Sequence[Mapping[str, Any]] | None,
    targets: Sequence[Any] | None,
    **further: Any,
) -> Microbatches:
    """Microbatches out of lists with an entry for each; None: nothing. InputError for a list of another length."""
    for name, found in {"arguments": args, "keyword arguments": kwargs, "targets": targets}.items():
        if found is not None and len(found) != number:
            raise InputError(f"{name} of {number} microbatches are needed, found {len(found)}")
    return Microbatches(args or [()] * number, kwargs or [{}] * number, targets, **further)
