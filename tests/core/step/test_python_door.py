import inspect

from farpipe.core.step import Problem, Rank, Stage


def test_a_problem_without_hops_has_free_ones():
    stages = tuple(Stage(rank=rank, forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0) for rank in range(3))
    problem = Problem(num_microbatches=4, ranks=(Rank(),) * 3, stages=stages)
    assert problem.hops == (None, None)
    assert Problem.from_json(problem.to_json()) == problem


def test_signatures_show_types_and_no_validators():
    text = str(inspect.signature(Stage)) + str(inspect.signature(Problem))
    assert "forward_s: float | tuple[float, ...]" in text
    assert "Validator" not in text
