"""``import farpipe``: the public names, and what only they do."""

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import farpipe
from farpipe.core.errors import InputError, UsageError
from farpipe.core.schedule.library import order
from farpipe.core.spec import parse_job
from farpipe.engine.launch.directory import RunPlace
from farpipe.planning import PlanDocument, reorder
from pipelines import pipeline, two_sites

ROOT = Path(__file__).parent.parent
JOB = ROOT / "recipes" / "two_sites.toml"
WITH_TORCH = {"torch"}


@pytest.mark.parametrize("name", sorted(set(farpipe.__all__) - WITH_TORCH))
def test_every_public_name_is_there_and_says_what_it_is(name):
    assert (getattr(farpipe, name).__doc__ or "").strip()


def test_names_are_listed_and_others_are_refused():
    assert set(farpipe.__all__) <= set(dir(farpipe))
    with pytest.raises(AttributeError, match="'farpipe' has no attribute 'plans'"):
        farpipe.plans  # noqa: B018
    with pytest.raises(ImportError):
        exec("from farpipe import plans")


def test_the_page_of_the_interface_has_every_public_name():
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    entries = {entry.rpartition(".")[2] for entry in re.findall(r"^::: (farpipe\S+)$", page, re.MULTILINE)}
    modules = {name for name in farpipe.__all__ if name in WITH_TORCH or isinstance(getattr(farpipe, name), ModuleType)}
    assert all(f"farpipe.{name}" in page for name in modules)
    assert set(farpipe.__all__) - modules <= entries | {"FarpipeError"}


def test_the_imports_for_type_checkers_are_those_that_happen():
    source = (ROOT / "src" / "farpipe" / "__init__.py").read_text(encoding="utf-8")
    typed = set()
    for module, names in re.findall(r"^    from farpipe\.(\S+) import (.*)$", source, re.MULTILINE):
        for name in names.split(", "):
            original, _, public = name.partition(" as ")
            typed.add((public or original, f"{module}:{original}"))
    assert typed == set(farpipe._HOMES.items())


def test_planning_from_python_loads_no_torch():
    code = f"import sys, farpipe; farpipe.quote(farpipe.load_job({str(JOB)!r})); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


CHANGED = {
    "cluster.links.0.latency": "80 ms",
    "training.num_steps": 7,
    "layout.virtual": 1,
    "training.microbatch_size": None,
}


def test_a_job_with_other_values_is_the_one_whose_file_says_so():
    text = JOB.read_text().replace('"20 ms"', '"80 ms"').replace("num_steps = 1000", "num_steps = 7")
    text = text.replace("microbatch_size = 1\n", "") + "\n[layout]\nvirtual = 1\n"
    wanted = parse_job(text)
    for source in (JOB, farpipe.load_job(JOB)):
        changed = farpipe.load_job(source, CHANGED)
        assert changed == wanted.model_copy(update={"text": changed.text})
        assert farpipe.load_job(changed, {"training.num_steps": 8}).training.num_steps == 8


def test_a_link_or_a_table_can_be_left_out():
    job = farpipe.load_job(JOB)
    assert farpipe.load_job(job, {"cluster.links.0": None, "layout.sites": ["zurich"]}).cluster.links == ()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cluster.links.1.latency", "80 ms", "links.1.latency: cluster.links has entries 0 to 0"),
        ("cluster.links.first.latency", "80 ms", r"cluster.links\[0\].first: unknown key"),
        ("cluster.links.0.latenzy", "80 ms", r"cluster.links\[0\].latenzy: unknown key; did you mean 'latency'"),
        ("cluster.links.0.latency", "80", "latency"),
        ("training.num_steps.most", 7, "training.num_steps is a value, not a table"),
        ("layout.pipeline", 4000, "layout"),
    ],
)
def test_a_change_is_checked_as_a_file_is(key, value, message):
    with pytest.raises(InputError, match=message):
        farpipe.load_job(JOB, {key: value})


def test_schedules_of_a_step_are_compared_as_the_command_does():
    found = farpipe.compare(two_sites(2, 8, latency=1.0, size=0.5), methods=["gpipe", "1f1b", "zbv"])
    assert found.rows[0].gap < found.rows[1].gap
    assert "zbv: needs two stages per rank in a V" in repr(found)
    assert found.timelines[2] is None
    assert "<svg" in found._repr_html_()


def test_timelines_are_compared_by_name():
    problem = pipeline(2, 4)
    one, two = (farpipe.simulate(problem, order(name, problem)) for name in ("1f1b", "zb-h1"))
    assert [row.method for row in farpipe.compare(one, two, names=["a", "b"]).rows] == ["a", "b"]
    found = farpipe.compare(one, two)
    assert [row.method for row in found.rows] == ["predicted 1", "predicted 2"]
    assert "gap" not in repr(found)
    assert "<svg" in found._repr_html_()


@pytest.mark.parametrize("options", [{"names": ["a"]}, {"methods": ["1f1b"]}, {"search_s": 1.0}])
def test_what_means_nothing_for_timelines_is_refused(options):
    problem = pipeline(2, 4)
    timeline = farpipe.simulate(problem, order("1f1b", problem))
    with pytest.raises(UsageError):
        farpipe.compare(timeline, timeline, **options)
    with pytest.raises(UsageError, match="compared alone"):
        farpipe.compare(problem, timeline)


def test_a_plan_has_its_timeline():
    plan = farpipe.plan(farpipe.load_job(JOB, {"training.global_batch": 32}))
    assert plan.timeline.makespan_s == pytest.approx(plan.prediction.makespan_s)
    assert (
        plan.model_copy(update={"schedule": plan.schedule.renamed("other")}).timeline.num_ranks
        == plan.timeline.num_ranks
    )


STEP = pipeline(2, 4)
WRONG = [
    (lambda plan: farpipe.plan("job.toml"), "plan: job: expected a Job, such as farpipe.load_job(FILE) reads"),
    (lambda plan: farpipe.plan(plan.job, "profile.json"), "plan: profiles: expected a list"),
    (lambda plan: farpipe.quote(3), "quote: job: expected a Job"),
    (lambda plan: farpipe.load_job(3), "load_job: source: expected the path of a job.toml"),
    (lambda plan: farpipe.load_job(plan.job, {3: 3}), "load_job: changes: expected keys and values"),
    (lambda plan: farpipe.load_job(plan.job, {"training.seed": {1}}), "training.seed: expected a value as in job.toml"),
    (lambda plan: farpipe.compare(plan.timeline, names=[1]), "compare: names[0]: expected a text; found 1"),
    (lambda plan: farpipe.load_job(plan.job, "seed"), "load_job: changes: expected keys and values"),
    (lambda plan: farpipe.simulate(STEP, "1f1b"), "simulate: schedule: expected a Schedule"),
    (lambda plan: farpipe.simulate(plan, plan.schedule), "simulate: problem: expected a Problem"),
    (lambda plan: farpipe.compare(STEP, methods="1f1b"), "compare: methods: expected a list"),
    (lambda plan: farpipe.compare(STEP, methods=[3]), "expected the name of a schedule"),
    (lambda plan: farpipe.compare(plan.timeline, 3), "compare: others[0]: expected a Timeline"),
    (lambda plan: farpipe.order(STEP, time_limit_s=-1), "order: time_limit_s: must be at least 0, found -1"),
    (lambda plan: farpipe.order(STEP, "local", seed=-1), "order: seed: expected a whole number"),
    (lambda plan: farpipe.train(3), "train: plan: expected a Plan or a Job"),
    (lambda plan: farpipe.train(plan, "run", device="cpu", num_steps=0), "the run's settings: num_steps: "),
    (lambda plan: farpipe.train(plan, "run", device="cpu", num_stepz=1), "num_stepz: unknown key; did you mean"),
    (lambda plan: farpipe.train(plan, "run", launching={"max_restart": 1}), "did you mean 'max_restarts'?"),
    (lambda plan: farpipe.learn(3), "learn: run: expected a Run"),
    (lambda plan: farpipe.fleet.play("fleet.toml", [], "easy"), "play: scenario: expected a Scenario"),
    (lambda plan: farpipe.Problem(num_microbatches=0, ranks=(), stages=()), "Problem: num_microbatches: "),
    (lambda plan: farpipe.testing.check_policy(3), "check_policy: policy: expected a policy"),
]


@pytest.fixture(scope="module")
def plan():
    return farpipe.plan(farpipe.load_job(JOB, {"training.global_batch": 32}))


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_wrong_argument_is_an_error_that_names_it(call, words, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        call(plan)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_continued_with_another_plan_says_so(plan, tmp_path):
    PlanDocument(plan=plan).save(tmp_path / "plan.json")
    place = RunPlace(tmp_path, in_place=True)
    assert place.change_of(plan) == ""
    changed = place.change_of(reorder(plan, "gpipe"))
    assert changed.startswith(f"{tmp_path}: continued with another plan: ")
    assert f"order gpipe (before: {plan.where}: {plan.degrees}, order {plan.schedule.method})" in changed
    assert RunPlace(tmp_path).change_of(reorder(plan, "gpipe")) == ""


def test_an_order_that_is_not_there_is_named_once():
    with pytest.raises(UsageError, match="there is no schedule 'nope'") as caught:
        farpipe.testing.check_order("nope")
    assert str(caught.value).count("nope") == 1


def test_a_number_of_a_link_means_the_same_in_every_change():
    job = farpipe.load_job(JOB)
    once = farpipe.load_job(job, {"cluster.links.0.latency": "80 ms"})
    twice = farpipe.load_job(once, {"cluster.links.0.latency": "90 ms"})
    assert [{link.latency_s for link in one.cluster.links} for one in (once, twice)] == [{0.08}, {0.09}]


@pytest.mark.slow
def test_a_job_of_documents_trains_as_a_job_and_not_as_a_plan(tmp_path, monkeypatch):
    """Each step of `data.packing` is planned, so its one plan is not enough."""
    monkeypatch.chdir(Path(__file__).parents[1])
    job = farpipe.load_job("recipes/long_documents.toml")
    with pytest.raises(farpipe.FarpipeError, match="give the job instead of its plan"):
        farpipe.train(farpipe.plan(job), tmp_path / "refused", num_steps=1)
    run = farpipe.train(job, tmp_path / "run", num_steps=2)
    assert len(run.metrics) == 2
    assert run.timeline.makespan_s > 0
