"""Runs whose sites leave and return, and what is left of them."""

import hashlib
import json
import os
import socket
import threading
from itertools import pairwise

from farpipe.core.schedule.library import order
from farpipe.core.spec import Data, Model, Training
from farpipe.core.step import Hop, Link, Problem, Rank, Stage
from farpipe.engine.checkpoint.folders import site_folder
from farpipe.engine.links import LinkShape
from farpipe.engine.outer.agent import Agent
from farpipe.engine.outer.elastic_trainer import ElasticTrainer
from farpipe.engine.outer.environment import Agents
from farpipe.engine.outer.meeting import START_S
from farpipe.engine.outer.membership import Membership
from farpipe.engine.outer.sites import run_at, sites_of
from farpipe.engine.outer.world import link_shapes
from farpipe.engine.run_spec import RunSpec
from farpipe.engine.train import train_rank
from in_process import run_ranks

MODEL = Model(name="tiny", num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, ffn_hidden=176, vocab_size=256)
SITES = ("zurich", "lugano")


def elastic_run(
    *, sites=SITES, num_ranks=1, num_steps=40, latency_s=0.01, mbit_s=100, model=MODEL, fields=None, **training
):
    """A replica of `num_ranks` stages at each of `sites`."""
    problem = Problem(
        num_microbatches=2,
        ranks=(Rank(),) * num_ranks,
        stages=tuple(Stage(rank=r, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.01) for r in range(num_ranks)),
        hops=(Hop(),) * (num_ranks - 1),
        links={
            f"{a}>{b}": Link(latency_s=latency_s, bandwidth_bytes_per_s=mbit_s * 1e6 / 8)
            for a in sites
            for b in sites
            if a != b
        },
    )
    cuts = [round(stage * MODEL.num_layers / num_ranks) for stage in range(num_ranks + 1)]
    settings = {
        "sequence_length": 64,
        "global_batch": 4 * 2 * len(sites),
        "microbatch_size": 4,
        "precision": "fp32",
        "learning_rate": 2e-3,
        "checkpoint_every_minutes": 0,
        "elastic": True,
        "zero": 0,
    }
    return RunSpec.bare(
        problem=problem,
        schedule=order("1f1b", problem),
        sites=(sites[0],) * num_ranks,
        replicas=tuple((site,) * num_ranks for site in sites),
        num_steps=num_steps,
        model=model,
        training=Training(**(settings | training)),
        data=Data(held_out=0.02),
        partition=tuple(pairwise(cuts)),
        **(fields or {}),
    )


class GoneError(Exception):
    """What ends a site in a test, as if its machine were lost."""


class SiteThreads:
    """The sites of a run as threads of this process: agents, ranks, and worlds over real sockets."""

    def __init__(self, run, run_dir, *, start_s=2 * START_S, tokens=None):
        """`tokens`: the secret of each site; default: one for all."""
        self.run, self.run_dir, self.start_s = run, run_dir, start_s
        self.sites = sites_of(run)
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in self.sites]
        self.links = LinkShape.create(link_shapes(run))
        self.tokens = tokens or [b"secret"] * len(self.sites)
        self.agents, self.threads, self.errors = {}, {}, {}
        self.trainers = {}
        run_dir.mkdir(parents=True, exist_ok=True)
        run.save(run_dir / "run.json")

    def agents_of(self, own):
        addresses = tuple(listener.getsockname() for listener in self.listeners)
        return Agents(self.sites, addresses, own, self.tokens[own], "127.0.0.1", None, False, self.links.path)

    def start(self, site, hook=lambda trainer, step: None):
        """Start the agent and the ranks of a site; ``hook(trainer, step)`` is called at the end of every step."""
        own = self.sites.index(site)
        agents = self.agents_of(own)
        if site in self.threads:  # its agent has stopped to listen, which stops for all descriptors
            address = self.listeners[own].getsockname()
            self.listeners[own].close()
            self.listeners[own] = socket.create_server(address)
        listener = socket.socket(fileno=os.dup(self.listeners[own].fileno()))
        agent = self.agents[site] = Agent(self.run_dir, agents, listener)
        agent.meeting._patience_s = self.start_s
        inner, folder = run_at(self.run, site), site_folder(self.run_dir, site)
        folder.mkdir(parents=True, exist_ok=True)

        def make(run, peers):
            trainer = self.trainers[site, peers.rank] = HookedTrainer(
                run, peers, self.run, Membership(self.run, agents, peers)
            )
            trainer.hook = hook
            return trainer

        def body():
            try:
                run_ranks(inner.num_processes, lambda peers: train_rank(inner, peers, folder, make_elastic=make), 120.0)
            except BaseException as error:
                self.errors[site] = error
            finally:
                self.end(site)

        self.threads[site] = threading.Thread(target=body, daemon=True)
        self.threads[site].start()
        return self

    def end(self, site):
        """End what is left of a site."""
        if (agent := self.agents.pop(site, None)) is not None:
            agent.close()
        for (name, _), trainer in self.trainers.items():
            if name == site:
                for world in (trainer.membership.world, trainer.membership.coming):
                    if world is not None and world.transport is not None:
                        world.transport.abort("it is gone")

    def join(self, *sites, limit_s=150.0):
        """Wait for sites to end."""
        for site in sites or self.sites:
            self.threads[site].join(limit_s)
            assert not self.threads[site].is_alive(), f"{site} hangs"

    def close(self):
        for site in [*self.agents]:
            self.end(site)
        for listener in self.listeners:
            listener.close()
        self.links.close()

    def lines(self, site):
        """The lines of the site's metrics by step."""
        path = site_folder(self.run_dir, site) / "metrics.jsonl"
        return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}

    def digest(self, site):
        """Of weights and moments at the end."""
        found = hashlib.sha256()
        for rank in range(run_at(self.run, site).num_processes):
            for tensor in self.trainers[site, rank]._state():
                found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()


class HookedTrainer(ElasticTrainer):
    """An ElasticTrainer whose phases a test can interrupt."""

    hook = staticmethod(lambda trainer, step: None)

    def at(self, phase, step):
        """Called in every phase of a step."""
        self.phase = phase
        self.hook(self, step)

    def begin_step(self, step):
        self.at("begin", step)
        super().begin_step(step)

    def _sum_over_sites(self, step):
        self.at("before the sum", step)
        super()._sum_over_sites(step)

    def _sum(self, step, mine):
        self.at("in the sum", step)
        found = super()._sum(step, mine)
        self.at("after the sum", step)
        return found

    def _put(self, flat):
        self.at("before the update", -1)
        super()._put(flat)

    def after_step(self, num_steps):
        self.at("after the step", num_steps - 1)
        super().after_step(num_steps)
