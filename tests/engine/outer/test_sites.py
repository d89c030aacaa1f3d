"""What each site of an elastic run does by itself, what is refused, and the record of all."""

import json

import pytest

from elastic_runs import elastic_run
from farpipe.core.errors import InputError
from farpipe.core.spec.training import ReplanSettings, Training
from farpipe.core.units import counted
from farpipe.engine.checkpoint.folders import site_folder
from farpipe.engine.launch.machines import Machine, sbatch_scripts, torchrun_commands
from farpipe.engine.outer.environment import AGENTS_VARIABLE, SITES_TOKEN_VARIABLE, Agents, agents_text
from farpipe.engine.outer.record import Record, site_event_text
from farpipe.engine.outer.sites import replicas_at, run_at, sites_of
from farpipe.report.membership import draw_membership, site_event_view

ADDRESSES = {"zurich": ("10.0.0.1", 29600), "lugano": ("10.0.0.2", 29600)}


def test_a_site_runs_its_replicas_with_the_order_and_steps_of_the_whole_run():
    run = elastic_run(num_ranks=2, num_steps=7)
    inner = run_at(run, "lugano")
    assert (inner.num_processes, inner.num_replicas, inner.num_steps) == (2, 1, 7)
    assert {inner.places.site(process) for process in range(2)} == {"lugano"}
    assert inner.plan.schedule == run.plan.schedule
    assert inner.plan.training.global_batch == run.plan.training.global_batch
    assert (sites_of(run), replicas_at(run, "lugano")) == (("zurich", "lugano"), (1,))
    with pytest.raises(InputError, match="no site 'geneva'"):
        run_at(run, "geneva")


@pytest.mark.parametrize(
    ("fields", "training", "words"),
    [
        ({}, {"zero": 1}, "can't be divided among sites"),
        ({"replan": ReplanSettings()}, {}, "re-planning"),
        ({"device": "sleep"}, {}, "sleep"),
    ],
)
def test_what_an_elastic_run_can_not_do_is_refused_by_name(fields, training, words):
    with pytest.raises(ValueError, match=words):
        elastic_run(fields=fields, **training)


def test_one_site_is_no_elastic_run():
    with pytest.raises(ValueError, match="two sites or more"):
        elastic_run(sites=("zurich",))


def test_zero_is_off_by_default_where_sites_may_leave():
    assert Training(sequence_length=1, global_batch=1, elastic=True).zero == 0
    assert Training(sequence_length=1, global_batch=1, elastic=True, zero=2).zero == 2
    assert Training(sequence_length=1, global_batch=1).zero == "auto"


def environment(**changes):
    return {AGENTS_VARIABLE: agents_text(ADDRESSES), SITES_TOKEN_VARIABLE: "secret"} | changes


def test_agents_are_found_in_the_environment():
    agents = Agents.from_env("lugano", "127.0.0.1", None, allow_plaintext=False, env=environment())
    assert agents.sites == ("zurich", "lugano")
    assert (agents.own, agents.others, agents.addresses[0]) == (1, (0,), ("10.0.0.1", 29600))


@pytest.mark.parametrize(
    ("site", "changes", "words"),
    [
        ("geneva", {}, "geneva among them"),
        ("lugano", {SITES_TOKEN_VARIABLE: ""}, "the same secret"),
        ("lugano", {AGENTS_VARIABLE: "lugano=10.0.0.1"}, "HOST:PORT"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(site, changes, words):
    with pytest.raises(InputError, match=words):
        Agents.from_env(site, "127.0.0.1", None, allow_plaintext=False, env=environment(**changes))


MACHINES = [
    Machine("zurich", 0, 2, "10.0.0.1"),
    Machine("zurich", 1, 2, "10.0.0.3"),
    Machine("lugano", 0, 4, "10.0.0.2"),
]


def test_each_site_gets_torchrun_commands_of_its_own(tmp_path):
    text = torchrun_commands(MACHINES, tmp_path, 3, is_elastic=True)
    agents = "FARPIPE_AGENTS=zurich=10.0.0.1:29600,lugano=10.0.0.2:29600"
    assert text.count(agents) == 3
    assert text.count("--nnodes 2") == 2
    assert "FARPIPE_SITE=lugano" in text
    assert "--nnodes 1 --nproc-per-node 4 --node-rank 0" in text
    assert text.count("--master-addr 10.0.0.2") == 1


def test_each_site_gets_a_script_of_its_own_for_slurm(tmp_path):
    scripts = sbatch_scripts(MACHINES, tmp_path, 3, with_gpus=False, is_elastic=True)
    assert "FARPIPE_SITE=lugano" in scripts["lugano.sbatch"]
    assert ": ${MASTER_ADDR:=10.0.0.2}" in scripts["lugano.sbatch"]
    assert "--node-rank $((0 + SLURM_NODEID))" in scripts["lugano.sbatch"]
    assert "FARPIPE_AGENTS" not in sbatch_scripts(MACHINES, tmp_path, 3, with_gpus=False)["lugano.sbatch"]


def line(step, loss, *, sites=("zurich", "lugano"), events=()):
    figures = dict.fromkeys(
        ("makespan_s", "step_s", "tokens_per_s", "bubble", "exposed_inter_site_s", "exposed_inter_site_max_s"), 1.0
    ) | dict.fromkeys(("exposed_intra_site_s", "exposed_intra_site_max_s"), 0.0)
    more = {"site_events": list(events)} if events else {}
    return {"step": step, "attempt": 0, "loss": loss, "grad_norm": 1.0, "sites": list(sites), **figures, **more}


def put(run_dir, site, *lines):
    folder = site_folder(run_dir, site)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in lines)


LOST = {"kind": "lost", "step": 1, "members": ["zurich", "lugano"]}


def test_the_record_has_each_step_once_whoever_does_it_first(tmp_path):
    seen, said = [], []
    record = Record(tmp_path, ("zurich", "lugano"), seen.append, said.append)
    put(tmp_path, "zurich", line(0, 5.0), line(1, 4.0, sites=["zurich"], events=[LOST]))
    record.read()
    put(tmp_path, "lugano", line(0, 5.0), line(3, 2.0))
    record.read()
    put(tmp_path, "zurich", line(2, 3.0, sites=["zurich"]))
    summary = record.finish()
    record.close()
    assert [(one["step"], one["loss"], one["recorded_by"]) for one in seen] == [
        (0, 5.0, "zurich"),
        (1, 4.0, "zurich"),
        (2, 3.0, "zurich"),
        (3, 2.0, "lugano"),
    ]
    assert seen[1]["site_events"] == [{"site": "zurich", **LOST}]
    assert (summary.num_steps, summary.first_loss, summary.last_loss, said) == (4, 5.0, 2.0, [])
    again = Record(tmp_path, ("zurich", "lugano"), None, said.append)
    put(tmp_path, "zurich", {**line(3, 2.0), "attempt": 1}, {**line(4, 1.0), "attempt": 1})
    again.finish()
    again.close()
    steps = [json.loads(text)["step"] for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4]


def test_a_step_that_sites_have_computed_differently_is_told(tmp_path):
    said = []
    record = Record(tmp_path, ("zurich", "lugano"), None, said.append)
    put(tmp_path, "zurich", line(0, 5.0))
    put(tmp_path, "lugano", line(0, 5.5))
    record.read()
    record.close()
    assert len(said) == 1
    assert "step 0: zurich and lugano have computed it differently" in said[0]


def test_the_report_shows_which_sites_computed_each_step():
    lines = [
        line(0, 5.0),
        line(1, 4.0, sites=["zurich"], events=[{"site": "zurich", **LOST}]),
        line(2, 3.0, sites=["zurich"]),
        line(3, 2.0),
    ]
    figure = draw_membership(lines, "band")
    assert f"{counted(4, 'step')}, 2 of them by fewer sites" in figure.description
    drawn = figure.inline()
    assert "steps 1 to 2: zurich" in drawn
    assert drawn.count("<title>steps") == 5
    assert site_event_view(lines).rows == (("1", "zurich", site_event_text(LOST)),)
    plain = [{key: value for key, value in one.items() if key not in ("sites", "site_events")} for one in lines]
    assert draw_membership(plain, "band") is None
    assert site_event_view(plain) is None


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"kind": "broken", "step": 3, "reason": "why"}, "lost the others in step 3: why"),
        ({"kind": "lost", "step": 3}, "completes step 3"),
        ({"kind": "helps", "step": 3, "sites": ["lugano"]}, "sends its state after 3 steps to lugano"),
        ({"kind": "entered", "step": 3, "members": ["a", "b"]}, "from step 3 on in one world with a and b"),
        ({"kind": "no world", "reason": "why"}, "joined no world: why"),
    ],
)
def test_events_in_words(event, words):
    assert words in site_event_text(event)
