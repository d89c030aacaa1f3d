"""Hops and layers of a run's stages: links by the ranks that they join, and a partition that has every layer once."""

from farpipe.core.spec import Model
from farpipe.core.spec.part import fault
from farpipe.core.step import Problem, Stage, Transfer


def hop_links(problem: Problem) -> dict[tuple[int, int], str]:
    """The link of every rank pair that a hop joins; a pair has one."""
    found: dict[tuple[int, int], str] = {}
    for index, hop in enumerate(problem.hops):
        a, b = problem.stages[index].rank, problem.stages[index + 1].rank
        if hop is None or a == b:
            continue
        for pair, transfer in (((a, b), hop.forward), ((b, a), hop.backward)):
            for name in _names(transfer):
                if found.setdefault(pair, name) != name:
                    raise fault(f"{name!r} and {found[pair]!r} both join ranks {pair[0]} and {pair[1]}", "problem")
    return found


def _names(transfer: Transfer | None) -> tuple[str, ...]:
    if transfer is None:
        return ()
    return (transfer.link,) if isinstance(transfer.link, str) else transfer.link


def check_partition(partition: tuple[tuple[int, int], ...], model: Model, stages: tuple[Stage, ...]) -> None:
    """Fault unless the stages have all layers, each once and in order."""
    if len(partition) != len(stages):
        raise fault(f"expected one entry per stage, {len(stages)}, found {len(partition)}", "partition")
    ends = (0, *(end for _, end in partition))
    for stage, ((first, end), before) in enumerate(zip(partition, ends, strict=False)):
        if first != before or end < first:
            raise fault(f"stage {stage} has layers {first} to {end}, but the one before ends at {before}", "partition")
    if ends[-1] != model.num_layers:
        raise fault(f"the last stage ends at layer {ends[-1]}, the model has {model.num_layers}", "partition")
