"""Runs with local steps over emulated links: the bits of one process, sites of unlike layouts, sites that return."""

import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.shared.disturbed import is_rank, processes_of
from elastic_runs import MODEL, elastic_run
from farpipe.cli.runs import load_run, write_pages
from farpipe.core.schedule.library import order
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.spec import LocalSteps, parse_job
from farpipe.core.step import Hop, Problem, Rank, Stage
from farpipe.engine.bare_plan import BarePlan
from farpipe.engine.checkpoint.files import Checkpoint, Piece
from farpipe.engine.checkpoint.folders import CHECKPOINTS_NAME, folder_of, site_folder
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.data.batches import load_batches
from farpipe.engine.executor.optimizer import Optimizer, learning_rate
from farpipe.engine.figures.metrics import Summary
from farpipe.engine.launch.run import run
from farpipe.engine.launch.runs import train
from farpipe.engine.outer.outer_optimizer import fragments_of, mean_of, merge, outer_update
from farpipe.engine.outer.sites import sites_of
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.stages.make_stage import make_stage, numerics_of
from farpipe.engine.stages.slices import StageSlice
from farpipe.planning.documents.batches import Share
from job_files import SMALL_MODEL

SITES = ("zurich", "lugano")
RANK = Path(__file__).with_name("unhurried_rank.py")


def local_run(local, num_steps=10, **options):
    return elastic_run(num_steps=num_steps, elastic=False, local_steps=local, clip_norm=1e9, **options)


def with_plans(spec, ranks_and_shares):
    """The run with a plan of its own for every site: (ranks of its pipeline, sequences of a step)."""
    plans = []
    for site, (num_ranks, share) in zip(SITES, ranks_and_shares, strict=True):
        problem = Problem(
            num_microbatches=share // 4,
            ranks=(Rank(),) * num_ranks,
            stages=tuple(
                Stage(rank=r, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01) for r in range(num_ranks)
            ),
            hops=(Hop(),) * (num_ranks - 1),
        )
        cuts = [round(stage * MODEL.num_layers / num_ranks) for stage in range(num_ranks + 1)]
        training = spec.plan.training.model_copy(update={"global_batch": share})
        plans.append(
            BarePlan(
                problem=problem,
                schedule=order("1f1b", problem),
                sites=(site,) * num_ranks,
                model=MODEL,
                training=training,
                data=spec.plan.data,
                partition=tuple(pairwise(cuts)),
            )
        )
    return RunSpec.from_json(spec.model_copy(update={"site_plans": tuple(plans)}).to_json())


class Reference:
    """All sites in one process, by the plain mathematics."""

    def __init__(self, spec, shares):
        self.local, training = spec.local_steps, spec.plan.training
        self.losses, self.tokens, self.sites = [[] for _ in shares], [float(share) for share in shares], []
        for number, share in enumerate(shares):
            stage = make_stage(
                MODEL, training, StageSlice(0, MODEL.num_layers, True, True), numerics_of(training), "cpu"
            )
            place = Share(0, 1, sum(shares[:number]), sum(shares))
            batches = load_batches(spec.plan.data, MODEL, (share // 4, 4, 64), training.seed, place)
            self.sites.append((stage, Optimizer(stage.module.parameters(), training), batches))
        self.weights = [dict(stage.module.named_parameters()) for stage, _, _ in self.sites]
        sizes = {name: p.numel() for name, p in self.weights[0].items()}
        self.names = fragments_of(sizes, self.local.fragments)
        self.anchor = {name: p.detach().clone() for name, p in self.weights[0].items()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.anchor.items()}
        self.sent, self.training = {}, training

    def run(self, num_steps):
        for step in range(num_steps):
            for number, (stage, optimizer, batches) in enumerate(self.sites):
                batch = batches.batch(step)
                stage.begin_step(batch)
                for microbatch in range(len(batch.tokens)):
                    stage.forward(microbatch, None)
                    stage.backward(microbatch, None)
                optimizer.set_learning_rate(learning_rate(self.training, step, num_steps))
                optimizer.update(0.0)
                self.losses[number].append(stage.loss)
            done = step + 1
            if done < num_steps:
                self._send(self.local.sent_after(done))
                self._merge(f for f in self.local.merged_after(done))
        under_way = [f for f, names in enumerate(self.names) if names[0] in self.sent]
        self._merge(under_way)
        self._send(range(len(self.names)))
        self._merge(range(len(self.names)))
        return self

    @torch.no_grad()
    def _send(self, fragments):
        for name in (name for fragment in fragments for name in self.names[fragment]):
            self.sent[name] = [self.anchor[name] - weights[name] for weights in self.weights]

    @torch.no_grad()
    def _merge(self, fragments):
        for name in (name for fragment in fragments for name in self.names[fragment]):
            mean = mean_of(self.sent.pop(name), self.tokens)
            outer_update(self.anchor[name], self.momentum[name], mean, self.local)
            for weights in self.weights:
                merge(weights[name], self.anchor[name], self.local)


def losses_of(run_dir, site):
    lines = (site_folder(run_dir, site) / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines)]


def kept(run_dir, site, num_steps, anchor):
    """Weights in the last checkpoint of a site, by name."""
    folder = folder_of(site_folder(run_dir, site) / CHECKPOINTS_NAME, num_steps)
    pieces = [Piece(f"weight/{n}", tuple(t.shape), 0, torch.full((t.numel(),), torch.nan)) for n, t in anchor.items()]
    Checkpoint(folder, Manifest.load(folder)).fill(pieces)
    return {piece.name.removeprefix("weight/"): piece.values for piece in pieces}


def expect_reference(run_dir, spec, shares):
    reference = Reference(spec, shares).run(spec.num_steps)
    for number, site in enumerate(SITES):
        assert losses_of(run_dir, site) == reference.losses[number]
        found = kept(run_dir, site, spec.num_steps, reference.anchor)
        for name, tensor in reference.anchor.items():
            assert torch.equal(found[name], tensor.view(-1)), name


@pytest.mark.parametrize(
    "local",
    [
        LocalSteps(every=3, learning_rate=0.7, momentum=0.9),
        LocalSteps(every=4, fragments=2, delay_steps=1, keep_local=0.5, momentum=0.5),
    ],
    ids=["blocking", "streaming"],
)
def test_losses_and_weights_are_those_of_one_process_to_the_last_bit(tmp_path, local):
    spec, run_dir = local_run(local), tmp_path / "run"
    run(spec, run_dir, allow_plaintext=True)
    expect_reference(run_dir, spec, (8, 8))
    lines = map(json.loads, (site_folder(run_dir, "zurich") / "metrics.jsonl").read_text().splitlines())
    messages = {line["step"] + 1: line["outer_messages"] for line in lines if "outer_messages" in line}
    assert [*messages][:-1] == [done for done in range(1, 10) if local.merged_after(done)]
    assert {tuple(one["from"]) for every in messages.values() for one in every} == {("lugano",)}
    timeline, step = Timeline.load(run_dir / "timeline.json"), Summary.load(run_dir / "summary.json").timeline_step
    shown = [(came.what, round(came.slack_s, 6)) for came in timeline.outer]
    assert shown == [(one["what"], one["slack_s"]) for one in messages[step + 1]]
    assert all(-60 < came.needed_s < 60 for came in timeline.outer), "on the clock of the step"


def test_sites_of_unlike_layouts_and_shares_train_one_model(tmp_path):
    spec = with_plans(local_run(LocalSteps(every=3, momentum=0.5)), [(2, 12), (1, 4)])
    run(spec, tmp_path / "run", allow_plaintext=True)
    expect_reference(tmp_path / "run", spec, (12, 4))


UNLIKE = f"""{SMALL_MODEL}
[training]
sequence_length = 64
global_batch = 24
microbatch_size = 2
num_steps = 6
precision = "fp32"
local_steps = {{ every = 3 }}

[[cluster.sites]]
name = "zurich"
device = "cpu"
num_devices = 2

[[cluster.sites]]
name = "lugano"
device = "cpu"
num_devices = 1

[[cluster.links]]
between = ["zurich", "lugano"]
latency = "10 ms"
bandwidth = "100 Mbit/s"
"""


@pytest.mark.slow
def test_a_job_of_unlike_sites_is_planned_site_by_site_and_trained(tmp_path):
    done = train(parse_job(UNLIKE), tmp_path / "run")
    assert [line["sites"] for line in done.metrics] == [["zurich", "lugano"]] * 6
    shares = {plan.sites[0]: plan.training.global_batch for plan in done.settings.site_plans}
    assert sum(shares.values()) == 24
    assert shares["zurich"] > shares["lugano"]
    assert {plan.sites[0]: plan.problem.num_ranks for plan in done.settings.site_plans} == {"zurich": 2, "lugano": 1}
    model, training = done.plan.model, done.plan.training
    whole = make_stage(
        model, training, StageSlice(0, model.num_layers, True, True), numerics_of(training), "cpu"
    ).module
    first, other = (kept(tmp_path / "run", site, 6, dict(whole.named_parameters())) for site in SITES)
    assert all(torch.equal(first[name], other[name]) for name in first)
    shown = load_run(tmp_path / "run")
    write_pages([shown], tmp_path / "page.html", tmp_path / "trace.json")
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.slow
def test_another_number_of_sites_goes_on_from_the_anchor_and_momentum(tmp_path):
    local = LocalSteps(every=3, learning_rate=0.7, momentum=0.9)
    sites = (*SITES, "turin")
    two = with_plans(local_run(local, 6, sites=sites), [(2, 12), (1, 12)])
    run(two, tmp_path / "two", allow_plaintext=True)
    spec = local_run(local, 9, sites=sites, fields={"resume": str(tmp_path / "two")})
    run(spec, tmp_path / "three", allow_plaintext=True)
    (step,) = {
        json.loads((site_folder(tmp_path / "three", site) / "metrics.jsonl").read_text().splitlines()[0])["step"]
        for site in sites
    }
    assert step == 6
    begun = Reference(two, (12, 12)).run(6).anchor
    last = json.loads((site_folder(tmp_path / "three", "zurich") / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(last["sites"]) > 1, "on a busy machine one may come too late"
    first, *others = (kept(tmp_path / "three", site, 9, begun) for site in last["sites"])
    assert all(torch.equal(first[name], other[name]) for name in begun for other in others)
    assert any(not torch.equal(first[name], begun[name].view(-1)) for name in begun)


class KilledAndBack:
    """What is heard of a run in which the ranks of one site are killed; the others wait for it, see RANK."""

    def __init__(self, spec, run_dir, site):
        self.site, self.run_dir, self._sites = site, run_dir, set(sites_of(spec))
        self.killed_at, self.returns, self.num_without = None, [], 0
        run(spec, run_dir, allow_plaintext=True, on_step=self._on_step, rank_program=(str(RANK),))

    def _on_step(self, line):
        is_whole = {*line["sites"]} == self._sites
        if self.killed_at is None:
            if is_whole and line["step"] >= 12:
                for process in filter(is_rank, processes_of(self.run_dir, self.site)):
                    os.kill(process, signal.SIGKILL)
                    self.killed_at = line["step"]
            return
        self.num_without += self.site not in line["sites"]
        entered = [e for e in line.get("site_events", ()) if (e["site"], e["kind"]) == (self.site, "entered")]
        self.returns += [event for event in entered if event["step"] > self.killed_at]
        if is_whole and self.returns:
            (self.run_dir / "back").touch()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_site_that_is_killed_comes_back_and_all_end_with_one_model(tmp_path):
    spec, run_dir = local_run(LocalSteps(every=5, momentum=0.5), 150, keep_checkpoints=1), tmp_path / "run"
    killed = KilledAndBack(spec, run_dir, "lugano")
    assert killed.num_without > 0
    assert killed.returns[0]["members"] == list(SITES)
    anchor = dict(Reference(spec, (8, 8)).anchor)
    one, other = (kept(run_dir, site, spec.num_steps, anchor) for site in SITES)
    assert all(torch.equal(one[name], other[name]) for name in anchor)
    numbers = [line["step"] for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())]
    assert numbers == [*range(spec.num_steps)], "no step is missing"
    losses = losses_of(run_dir, "zurich")
    assert losses[-1] < losses[12]


@pytest.mark.slow
def test_of_three_sites_two_are_a_quorum_and_a_site_that_was_killed_returns_to_one_model(tmp_path):
    sites, run_dir = (*SITES, "geneva"), tmp_path / "run"
    spec = local_run(LocalSteps(every=5, quorum=2, grace_s=0.05), 150, sites=sites, keep_checkpoints=1)
    killed = KilledAndBack(spec, run_dir, "geneva")
    assert killed.num_without > 0
    assert killed.returns
    anchor = dict(Reference(spec, (8, 8, 8)).anchor)
    first, *others = (kept(run_dir, site, spec.num_steps, anchor) for site in sites)
    assert all(torch.equal(first[name], other[name]) for name in anchor for other in others)
    assert any(not torch.equal(first[name], anchor[name].view(-1)) for name in anchor)
