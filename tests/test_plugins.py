"""Orders, policies and assignments of installed distributions: a real one, in a folder on the path."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import farpipe
from benchmarks.fleet import baselines
from benchmarks.fleet.baselines import BASELINES
from farpipe.cli.app import app
from farpipe.core.errors import InputError, UsageError, UsersCodeError
from farpipe.core.step import Schedule
from farpipe.fleet.policies import ADDED, policy_of
from farpipe.optical import find_policy
from farpipe.testing import check_order, check_policy
from pipelines import pipeline
from planning.planner.jobs import job

MODULE = '''
from farpipe.core.schedule.library import order
from farpipe.fleet.policies import POLICIES
from farpipe.optical.policies import AssignmentPolicy

def mine(problem):
    return order("1f1b", problem)

def breaks(problem):
    return 1 / 0

class Mine:
    """Jobs as they come, as fcfs."""
    name = "mine"

    def decide(self, view):
        return POLICIES["fcfs"].decide(view)

policy = Mine()
assignment = AssignmentPolicy("far-first", "cross-domain", "last", (1.0, 0.0, 0.0))
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution with these entry points; its module is new to every test."""

    def put(points, name="farpipe-demo", module=MODULE):
        place = tmp_path / name
        info = place / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(points)
        (place / "demo.py").write_text(module)
        monkeypatch.delitem(__import__("sys").modules, "demo", raising=False)
        monkeypatch.syspath_prepend(str(place))

    return put


ALL = """
[farpipe.orders]
theirs = demo:mine
[farpipe.policies]
mine = demo:policy
[farpipe.assignments]
far-first = demo:assignment
"""


def test_baselines_of_benchmarks_are_policies_where_their_entry_points_are_on_the_path(monkeypatch):
    for name in BASELINES:
        with pytest.raises(UsageError, match="there is no policy"):
            policy_of(name)
    monkeypatch.syspath_prepend(str(Path(baselines.__file__).parent / "entry_points"))
    assert {name: policy_of(name) for name in ADDED.names} == BASELINES
    for policy in BASELINES.values():
        check_policy(policy, num_fleets=1)


def test_what_a_distribution_adds_is_found_by_name(install):
    install(ALL)
    problem = pipeline(2, 4)
    assert farpipe.order(problem, "theirs").schedule.method == "theirs"
    assert farpipe.plan(job(schedule="theirs", pipeline=2)).schedule.method == "theirs"
    assert "theirs" in repr(farpipe.compare(problem))
    assert check_order("theirs") == ("one stage per rank",)
    check_policy(policy_of("mine"), num_fleets=1)
    assert find_policy("far-first").slots == "last"


def test_a_fault_is_told_once_for_each_shape_of_pipeline():
    with pytest.raises(AssertionError) as raised:
        check_order(lambda problem: Schedule(problem.num_microbatches, ((),) * problem.num_ranks, "empty"))
    text = str(raised.value)
    assert text.count("is not valid: 0F0 is missing") == 3
    assert text.count("no step works; raise farpipe.core.errors.InputError if the order is not for it") == 3


def test_commands_know_it(install, tmp_path):
    install(ALL)
    pipeline(2, 4).save(tmp_path / "problem.json")
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "problem.json"), "--method", "theirs"])
    assert "theirs" in shown.stdout
    assert "Jobs as they come, as fcfs." in CliRunner().invoke(app, ["list", "policies"]).stdout
    assert "theirs" in CliRunner().invoke(app, ["list", "schedules"]).stdout
    assert "far-first" in CliRunner().invoke(app, ["list", "assignments"]).stdout


def test_a_plan_does_not_depend_on_what_is_installed(install):
    before = farpipe.plan(job()).to_json()
    install("[farpipe.orders]\nzb-9 = demo:mine\n")
    assert farpipe.plan(job()).to_json() == before


def test_an_unknown_name_lists_what_distributions_add(install):
    install(ALL)
    with pytest.raises(UsageError, match=r"did you mean 'theirs'.*wave, theirs"):
        farpipe.order(pipeline(2, 4), "their")
    with pytest.raises(UsageError, match="farpipe, mine"):
        policy_of("min")
    with pytest.raises(UsageError, match="cd, far-first"):
        find_policy("far")


def test_a_name_that_is_farpipe_s_own_is_refused_and_names_the_distribution(install):
    install("[farpipe.orders]\n1f1b = demo:mine\n")
    assert farpipe.order(pipeline(2, 4), "1f1b").schedule.method == "1f1b"
    with pytest.raises(InputError, match=r"order '1f1b' of the installed distribution farpipe-demo 1\.2: farpipe has"):
        farpipe.compare(pipeline(2, 4))


def test_two_distributions_with_one_name_are_both_named(install):
    install(ALL)
    install(ALL, "farpipe-other")
    with pytest.raises(InputError, match=r"farpipe-\w+ 1\.2: farpipe-\w+ 1\.2 has one too; uninstall one"):
        farpipe.order(pipeline(2, 4), "theirs")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("demo:nothing", InputError, r"'bad' of the installed distribution farpipe-demo 1\.2: can't be imported: Attr"),
        ("gone:mine", InputError, r"farpipe-demo 1\.2: can't be imported: ModuleNotFoundError"),
        ("demo:policy", InputError, r"farpipe-demo 1\.2: demo:policy is Mine, not a valid order"),
        ("demo:breaks", UsersCodeError, "bad: ZeroDivisionError"),
    ],
)
def test_a_broken_one_is_named(install, value, error, message):
    install(f"[farpipe.orders]\nbad = {value}\n")
    with pytest.raises(error, match=message):
        farpipe.order(pipeline(2, 4), "bad")
