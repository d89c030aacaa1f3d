"""Losses of the ways to use two sites: exact replicas, local steps, one site alone. Appends lines to a file.

    python -m benchmarks.engine.local_losses LOSSES.jsonl [--until 17:05]

Losses depend on no clock, so one process computes all sites in turn, with farpipe's own decoder, text, optimizer and
the mathematics of `farpipe.engine.outer`; what is in the file already is not computed again. Replicas that sum their
gradients, a pipeline and one site with the whole batch have the same numbers: "whole". Times are in `ways_by_link`.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from farpipe.core.spec import Data, LocalSteps, Model, Training
from farpipe.engine.data.batches import Batch, Batches, load_batches
from farpipe.engine.executor.optimizer import Optimizer, learning_rate
from farpipe.engine.outer.differences import difference
from farpipe.engine.outer.outer_optimizer import fragments_of, mean_of, merge, outer_update
from farpipe.engine.stages.make_stage import make_stage, numerics_of
from farpipe.engine.stages.slices import StageSlice
from farpipe.planning.documents.batches import WHOLE, Share

MODELS: Final = {
    "28k": Model(name="28k", num_layers=1, hidden=32, num_heads=4, num_kv_heads=2, ffn_hidden=88, vocab_size=256),
    "125k": Model(name="125k", num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, ffn_hidden=176, vocab_size=256),
}
NUM_SITES, SEQUENCES, LENGTH, NUM_STEPS = 2, 4, 64, 3000
"""Sequences of a step at one site, and their tokens."""
DATA: Final = Data(held_out=0.02)
EVALUATED: Final = 32
"""Batches of the held-out text in one evaluation."""
SEEDS: Final = (0, 1, 2)


class Way(NamedTuple):
    """A training: how many steps, and what the sites do."""

    name: str
    num_steps: int = NUM_STEPS
    local: LocalSteps | None = None
    is_half: bool = False
    """True: one site alone, with its half of the batch."""


def _local(name: str, num_steps: int = NUM_STEPS, **settings: Any) -> Way:
    return Way(name, num_steps, LocalSteps.model_validate(settings))


DILOCO: Final[dict[str, Any]] = {"learning_rate": 0.7, "momentum": 0.9}
STREAMING: Final[dict[str, Any]] = {"fragments": 3, "delay_steps": 3, "keep_local": 0.5}
FIRST: Final = (Way("whole"), Way("half", is_half=True), _local("mean 30", every=30))
THEN: Final = (_local("mean 100", every=100), _local("streaming 30", every=30, **STREAMING))
SHORTER: Final = tuple(Way("whole", NUM_STEPS >> part) for part in (1, 2, 3, 4))
MORE: Final = (
    _local("diloco 30", every=30, **DILOCO),
    _local("mean 10", every=10),
    _local("mean 300", every=300),
)
LAST: Final = (
    _local("diloco 10", every=10, **DILOCO),
    _local("diloco 100", every=100, **DILOCO),
    _local("diloco 300", every=300, **DILOCO),
    _local("streaming diloco 30", every=30, **STREAMING, **DILOCO),
    _local("streaming 30 int4", every=30, wire_type="int4", **STREAMING),
    Way("half", 2 * NUM_STEPS, is_half=True),
    Way("half", NUM_STEPS >> 1, is_half=True),
    _local("mean 30", NUM_STEPS >> 1, every=30),
)
PLAN: Final = (
    *(("28k", ways) for ways in (FIRST, THEN, SHORTER, MORE)),
    *(("125k", ways) for ways in (FIRST, THEN, SHORTER)),
    *((name, LAST) for name in MODELS),
    ("125k", MORE),
)
"""What is computed, the most needed first."""


def training_of(way: Way, seed: int) -> Training:
    """Settings that all ways have in common."""
    return Training(
        sequence_length=LENGTH,
        global_batch=NUM_SITES * SEQUENCES,
        microbatch_size=SEQUENCES,
        num_steps=way.num_steps,
        precision="fp32",
        learning_rate=2e-3,
        warmup_steps=30,
        decay="cosine",
        final_learning_rate=2e-4,
        seed=seed,
        zero=0,
    )


class Replica:
    """One copy of the model, with an optimizer and a share of the text."""

    def __init__(self, model: Model, training: Training, share: Share) -> None:
        self._training = training
        whole = StageSlice(0, model.num_layers, True, True)
        self.stage = make_stage(model, training, whole, numerics_of(training), "cpu")
        self.parameters = dict(self.stage.module.named_parameters())
        self._optimizer = Optimizer(self.parameters.values(), training)
        shape = (NUM_SITES, SEQUENCES, LENGTH)
        self.batches: Batches = load_batches(DATA, model, shape, training.seed, share)

    def step(self, step: int) -> None:
        """One step on its share alone."""
        batch = self.batches.batch(step)
        self.stage.begin_step(Batch(batch.tokens, batch.targets))  # divided by its own tokens
        for microbatch in range(len(batch.tokens)):
            self.stage.forward(microbatch, None, in_parts=False)
            self.stage.backward(microbatch, None)
        self._optimizer.set_learning_rate(learning_rate(self._training, step, self._training.num_steps))
        self._optimizer.update(math.sqrt(self._optimizer.sum_of_squares().total))


class Merging:
    """The outer optimizer of replicas in one process."""

    def __init__(self, replicas: list[Replica], settings: LocalSteps) -> None:
        self._replicas, self._settings = replicas, settings
        first = replicas[0].parameters
        self._names = fragments_of({name: p.numel() for name, p in first.items()}, settings.fragments)
        self._anchor = {name: p.detach().clone() for name, p in first.items()}
        self._momentum = {name: torch.zeros_like(p) for name, p in self._anchor.items()}
        self._sent: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def after(self, num_steps: int) -> None:
        """Send what is due after so many steps, and merge what is due."""
        for name in self._named(self._settings.sent_after(num_steps)):
            box = tuple((0, size) for size in self._anchor[name].shape)
            deltas = [self._anchor[name] - one.parameters[name] for one in self._replicas]
            self._sent[name] = [difference(delta, box, self._settings.wire_type).values for delta in deltas]
        for name in self._named(self._settings.merged_after(num_steps)):
            mean = mean_of(self._sent.pop(name), [1.0] * len(self._replicas))
            outer_update(self._anchor[name], self._momentum[name], mean, self._settings)
            for one in self._replicas:
                merge(one.parameters[name], self._anchor[name], self._settings)

    def _named(self, fragments: list[int]) -> Iterator[str]:
        return (name for fragment in fragments for name in self._names[fragment])


@torch.no_grad()
def held_out_loss(replicas: list[Replica]) -> float:
    """The loss of the replicas' mean on text that is never trained on."""
    first = replicas[0]
    own = {name: p.clone() for name, p in first.parameters.items()}
    for name, parameter in first.parameters.items():
        parameter.copy_(torch.stack([one.parameters[name] for one in replicas]).mean(dim=0))
    total, count = 0.0, 0
    for index in range(EVALUATED):
        batch = first.batches.held_out_batch(index)
        batch = Batch(batch.tokens, batch.targets)
        first.stage.begin_step(batch)
        for microbatch in range(len(batch.tokens)):
            first.stage.evaluate(microbatch, None)
        total, count = total + first.stage.loss * batch.num_target_tokens, count + batch.num_target_tokens
    for name, parameter in first.parameters.items():
        parameter.copy_(own[name])
    return total / count


def measure(model: Model, way: Way, seed: int) -> dict[str, Any]:
    """One training: losses on held-out text every sixth of it."""
    begin_s, training = time.process_time(), training_of(way, seed)
    shares = [Share(site, NUM_SITES) for site in range(NUM_SITES)] if way.local else [WHOLE]
    replicas = [Replica(model, training, share) for share in ([Share(0, NUM_SITES)] if way.is_half else shares)]
    merging = Merging(replicas, way.local) if way.local else None
    curve = []
    for step in range(way.num_steps):
        for replica in replicas:
            replica.step(step)
        if merging is not None:
            merging.after(step + 1)
        if (step + 1) % (NUM_STEPS // 6) == 0 or step + 1 == way.num_steps:
            curve.append((step + 1, round(held_out_loss(replicas), 5)))
    num_params = sum(p.numel() for p in replicas[0].parameters.values())
    found = {"model": model.name, "way": way.name, "num_steps": way.num_steps, "seed": seed, "loss": curve[-1][1]}
    return found | {"curve": curve, "num_params": num_params, "cpu_s": round(time.process_time() - begin_s, 1)}


def main() -> None:
    """Compute what the file lacks, the most needed first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--until", default="23:59", help="No training begins after this time of the day.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = given.file.read_text(encoding="utf-8").splitlines() if given.file.exists() else []
    known = {(one["model"], one["way"], one["num_steps"], one["seed"]) for one in map(json.loads, lines)}
    plan = [(name, way, seed) for name, ways in PLAN for seed in SEEDS for way in ways]
    for name, way, seed in plan:
        if (name, way.name, way.num_steps, seed) in known or time.strftime("%H:%M") >= given.until:
            continue
        with given.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(measure(MODELS[name], way, seed)) + "\n")


if __name__ == "__main__":
    main()
