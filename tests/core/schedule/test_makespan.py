import pytest
from hypothesis import given, settings

from farpipe.core.simulate import simulate
from farpipe.core.step.player import makespan_s
from strategies import problems_with_schedules


@given(problems_with_schedules())
@settings(max_examples=150, deadline=None)
def test_the_makespan_is_the_simulator_s(case):
    problem, schedule = case
    assert makespan_s(problem, schedule) == pytest.approx(simulate(problem, schedule).makespan_s, rel=1e-12)
