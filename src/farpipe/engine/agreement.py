"""Agreement of all processes of a run on what they have to have in common before its first step."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from farpipe import __version__
from farpipe.core.errors import InputError, RunError
from farpipe.engine.checkpoint.files import digest
from farpipe.engine.checkpoint.manifest import ModelFacts
from farpipe.engine.executor.peers import Peers
from farpipe.engine.executor.work import Work
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages.slices import ModuleSlice
from farpipe.engine.versions import versions_of
from farpipe.planning import Plan

_AGREEMENTS: Final = (
    ("farpipe", "versions of farpipe", "install the same one on every site"),
    ("torch", "versions of torch", "install the same one on every site"),
    ("transformers", "versions of transformers", "install the same one on every site"),
    ("run", "run.json files", "copy the run directory of one site to the others"),
    ("plan", "plan.json files", "copy the run directory of one site to the others"),
    ("data", "training texts", "copy data.source to every site (for stdlib: the same version of Python)"),
)
"""Key of what has to agree, its words, and the hint where it does not."""
_COPY: Final = "copy the same model to every site"


class Agreement(NamedTuple):
    """Facts that all ranks have in common."""

    batches_sha256: str
    """The digest of the batches, in hexadecimal; empty for a rehearsal."""
    facts: ModelFacts
    """The model's, of all ranks together."""
    different_weights: str = ""
    """A difference between sites in the files that training begins with; harmless after a checkpoint."""


def agree(run: RunSpec, work: Work, peers: Peers) -> Agreement:
    """Compare what all ranks are about to run; all of them see the same differences and stop."""
    with leaving_together(peers):
        return _agree(run, work, peers)


@contextmanager
def leaving_together(peers: Peers) -> Iterator[None]:
    """Context of what all ranks refuse alike; none leaves before all have seen why, or they would report that."""
    try:
        yield
    except InputError:
        with suppress(RunError):
            peers.exchange("refused", b"", waiting_for="the others to see what differs")
        raise


def _agree(run: RunSpec, work: Work, peers: Peers) -> Agreement:
    facts, weights = _facts(run, work)
    mine: dict[str, Any] = {
        "farpipe": __version__,
        **versions_of(run),
        "run": hashlib.sha256(run.to_json().encode()).hexdigest(),
        "plan": hashlib.sha256(run.plan.to_json().encode()).hexdigest() if isinstance(run.plan, Plan) else "",
        "data": work.data_digest.hex(),
        "boundaries": dict(work.boundaries),
        "facts": facts.model_dump(),
        "weights": weights,
    }
    answers = peers.exchange("start", json.dumps(mine).encode(), waiting_for="what the others are going to run")
    found = [json.loads(answer) for answer in answers]
    for key, what, hint in _AGREEMENTS:
        first = next((rank for rank, answer in enumerate(found) if answer[key]), 0)
        other = next((r for r, answer in enumerate(found) if answer[key] and answer[key] != found[first][key]), None)
        if other is not None:
            raise InputError(f"ranks {first} and {other} have different {what}; {hint}")
    all_facts = _common_facts(run, [ModelFacts(**answer["facts"]) for answer in found])
    _expect_equal_boundaries(run, [answer["boundaries"] for answer in found])
    batches = next((str(answer["data"]) for answer in found if answer["data"]), "")
    return Agreement(batches, all_facts, _difference(run, [answer["weights"] for answer in found], "weights of {}"))


def _facts(run: RunSpec, work: Work) -> tuple[ModelFacts, dict[str, str]]:
    """Facts that this rank has read of the model besides the plan, and digests of the files of weights."""
    if run.plan.model is None or run.device == "sleep":
        return ModelFacts(), {}
    if run.plan.model.module is not None:
        from farpipe.engine.stages.own_module import digests_of_files

        return ModelFacts(code=digests_of_files(run.plan.model.module)), {}
    if not run.plan.model.is_of_transformers:
        return ModelFacts(), {}
    if run.plan.model.hugging_face is None:
        return ModelFacts(transformers=versions_of(run)["transformers"]), {}
    from farpipe.engine.stages.hugging_face_weights import config_facts, sampled_digests

    version, config = versions_of(run)["transformers"], config_facts(run.plan.model.hugging_face)
    weights, untrained = sampled_digests(run.plan.model.hugging_face), _buffers(work)
    if run.plan.training is not None and run.plan.training.lora is not None:
        untrained |= weights
    return ModelFacts(transformers=version, config=config, buffers=untrained), weights


def _buffers(work: Work) -> dict[str, str]:
    """Digests of tensors that stages read from the model's files at every start, since they are not trained."""
    modules = [getattr(stage, "module", None) for stage in work.stages.values()]
    inner = [module.inner for module in modules if isinstance(module, ModuleSlice)]
    named = [(name, buffer, module.state_dict()) for module in inner for name, buffer in module.named_buffers()]
    return {name: digest(buffer.cpu()) for name, buffer, saved in named if name in saved}


def _common_facts(run: RunSpec, facts: Sequence[ModelFacts]) -> ModelFacts:
    """The facts of all ranks together; InputError where sites have different models."""
    configs = [found.config for found in facts]
    keys = {key for config in configs for key in config}
    whole = [dict.fromkeys(keys, "absent") | config for config in configs]
    texts = {name: [getattr(found, name) for found in facts] for name in ("buffers", "code")}
    for digests, what in ((whole, "{} in config.json"), (texts["buffers"], "{}"), (texts["code"], "module {}")):
        if problem := _difference(run, digests, what, shown=digests is whole):
            raise InputError(problem)
    return ModelFacts(
        transformers=facts[0].transformers,
        config=configs[0],
        buffers={name: digest for each in texts["buffers"] for name, digest in each.items()},
        code=texts["code"][0],
    )


def _difference(run: RunSpec, found: Iterable[Mapping[str, str]], what: str, *, shown: bool = False) -> str:
    """The first thing that two ranks have not in common, in words; `shown`: with its values."""
    first: dict[str, tuple[int, str]] = {}
    for rank, mine in enumerate(found):
        for name, value in sorted(mine.items()):
            other, theirs = first.setdefault(name, (rank, value))
            if value != theirs:
                places = [f"site {run.places.site(one)} (rank {one})" for one in (other, rank)]
                values = f"{theirs} at {places[0]} and {value} at {places[1]}"
                said = f"is {values}" if shown else f"differs between {' and '.join(places)}"
                return f"{_place(run)}{what.format(name)} {said}; {_COPY}"
    return ""


def _place(run: RunSpec) -> str:
    assert run.plan.model is not None
    return f"{run.plan.model.hugging_face}: " if run.plan.model.hugging_face else "model.module: "


def expect_same_facts(run: RunSpec, facts: ModelFacts, then: ModelFacts, site: str) -> None:
    """InputError, naming `site`, where the model of a checkpoint was another one; its code may have changed."""
    is_same_version = facts.transformers == then.transformers
    keys = facts.config.keys() | then.config.keys() if is_same_version else facts.config.keys() & then.config.keys()
    for key in sorted(keys):
        was, now = (config.get(key, "absent") for config in (then.config, facts.config))
        if was != now:
            raise InputError(f"{_place(run)}{key} in config.json is {now} at site {site}, and was {was}")
    for name, now in sorted(facts.buffers.items()):
        if then.buffers.get(name, now) != now:
            raise InputError(f"{_place(run)}{name}, which no checkpoint has, is no longer the same at site {site}")


def changed_code(facts: ModelFacts, then: ModelFacts) -> tuple[str, ...]:
    """A warning where the user's own module is no longer that of a checkpoint: a mended error, or another model."""
    changed = [name for name, now in facts.code.items() if then.code.get(name, now) != now]
    return (f"model.module: {', '.join(changed)} is not what the checkpoint was trained with",) if changed else ()


def _expect_equal_boundaries(run: RunSpec, boundaries: Sequence[Mapping[str, str]]) -> None:
    """InputError where neighbouring stages of a replica disagree on what goes from one to the other.

    `boundaries`: what `Work.boundaries` has, by process.
    """
    for process, mine in enumerate(boundaries):
        _, replica, twin = run.places.of(process)
        for stage in map(int, mine):
            if stage + 1 == run.plan.problem.num_stages:
                continue
            other = run.places.process(run.plan.problem.stages[stage + 1].rank, replica, twin)
            given, taken = mine[str(stage)], boundaries[other].get(str(stage + 1))
            if given != taken:
                raise InputError(
                    f"rank {process} gives {given} after stage {stage}, but rank {other} takes {taken}; install the "
                    "same farpipe and copy the same model to every site"
                )
