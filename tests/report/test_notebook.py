from farpipe import planning
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from planning.planner.jobs import job
from report.steps import two_sites


def test_timelines_and_plans_draw_themselves_in_notebooks():
    problem = two_sites(2, 4)
    assert simulate(problem, order("1f1b", problem))._repr_svg_().startswith("<svg")
    assert "Timeline of one step" in planning.plan(job())._repr_svg_()


def test_a_document_without_a_picture_shows_its_text():
    assert two_sites(2, 4)._repr_svg_() is None
