import pytest

from farpipe import planning
from farpipe.core.errors import InfeasibleError, InputError, ScheduleError, UsersCodeError
from farpipe.core.schedule.library import order
from farpipe.core.step import Problem, Rank, Schedule, Stage
from farpipe.planning.planner.orders import find_order, try_orders
from planning.planner.jobs import job

SOURCE = """
from farpipe.core.errors import InputError
from farpipe.core.schedule.library import order
from farpipe.core.step import Schedule

def mine(problem):
    return order("gpipe", problem)

def undefined(problem):
    raise InputError("it needs three ranks")

def none(problem):
    pass

def rows(problem):
    return [[]] * problem.num_ranks

def breaks(problem):
    return problem.nothing

def leaves(problem):
    raise SystemExit(0)

def empty(problem):
    return Schedule(problem.num_microbatches, [[]] * problem.num_ranks)
"""
STAGE = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0}
PROBLEM = Problem(num_microbatches=4, ranks=(Rank(), Rank()), stages=tuple(Stage(rank=r, **STAGE) for r in range(2)))


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_an_order_in_a_file_is_a_method_like_any_other(mine):
    outcomes = try_orders(PROBLEM, ["gpipe", f"{mine}:mine"])
    assert {outcome.makespan_s for outcome in outcomes} == {outcomes[0].makespan_s}


@pytest.mark.slow
def test_a_job_may_name_an_order_in_a_file(mine):
    plan = planning.plan(job(schedule=f"{mine}:mine", pipeline=2))
    assert plan.schedule.method == f"{mine}:mine"


def test_in_python_a_function_is_a_method():
    def gpipe_again(problem):
        return order("gpipe", problem).renamed("again")

    found = find_order(PROBLEM, gpipe_again)
    assert found.schedule.method == "again"
    assert "np." not in repr(found)


def test_an_own_order_is_checked(mine):
    with pytest.raises(ScheduleError, match="0F0 is missing on rank 0"):
        find_order(PROBLEM, f"{mine}:empty")
    with pytest.raises(ScheduleError, match="is not valid"):
        find_order(PROBLEM, lambda problem: Schedule(4, [[], []]))


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.py:mine", "there is no such file"), ("mine.py:yours", "has no function 'yours'")],
)
def test_what_a_file_lacks_is_said(mine, monkeypatch, name, message):
    monkeypatch.chdir(mine.parent)
    with pytest.raises(InputError, match=message):
        find_order(PROBLEM, name)


def test_a_file_that_can_not_be_run_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(InputError, match=r"broken\.py: can't be imported: ZeroDivisionError"):
        find_order(PROBLEM, f"{tmp_path / 'broken.py'}:mine")


FAULTS = {
    "none": "gives nothing, not a farpipe.Schedule",
    "rows": "gives list, not a farpipe.Schedule",
    "breaks": r"AttributeError: .*nothing.* \(\S+mine\.py:\d+ in breaks\)",
    "leaves": r"SystemExit\(0\) \(\S+mine\.py:\d+ in leaves\)",
}


@pytest.mark.parametrize(("name", "message"), FAULTS.items())
def test_a_function_that_breaks_or_gives_no_order_is_named_and_no_layout_is_blamed(mine, name, message):
    with pytest.raises(UsersCodeError, match=rf"mine\.py:{name}: {message}"):
        find_order(PROBLEM, f"{mine}:{name}")
    with pytest.raises(UsersCodeError, match=rf"mine\.py:{name}: {message}"):
        planning.plan(job(schedule=f"{mine}:{name}", pipeline=2))
    with pytest.raises(InfeasibleError, match="it needs three ranks"):
        planning.plan(job(schedule=f"{mine}:undefined", pipeline=2))


def test_in_python_a_function_that_gives_none_is_named_too():
    with pytest.raises(UsersCodeError, match=r"pass_by: gives nothing, not a farpipe\.Schedule"):
        find_order(PROBLEM, pass_by)


def pass_by(problem):
    """Give nothing."""


def test_a_file_that_leaves_while_it_is_imported_is_named(tmp_path):
    (tmp_path / "script.py").write_text("import sys\nsys.exit('usage: script')")
    with pytest.raises(InputError, match=r"script\.py: can't be imported: SystemExit\('usage: script'\)"):
        find_order(PROBLEM, f"{tmp_path / 'script.py'}:mine")
