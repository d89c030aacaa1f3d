import json
from statistics import fmean

import numpy as np
import pytest

from engine.control.test_measured import real_problem
from farpipe.core.schedule import check
from farpipe.core.simulate import simulate
from farpipe.core.step import Rank, Schedule
from farpipe.engine.control.beside import answers
from farpipe.engine.control.measured import replaced
from farpipe.engine.control.searcher import prepare, question, seek
from farpipe.planning.search import search
from two_sites import two_sites

FAR = real_problem(latency_s=0.06, rate=50e6 / 8, num_microbatches=16)


def varied(problem, seed, mean):
    """Every action longer by its own part, `mean` on average."""
    random = np.random.default_rng(seed)
    stages = [
        stage.model_copy(
            update={
                figure: tuple(getattr(stage, figure) * (1 + random.exponential(mean, problem.num_microbatches)))
                for figure in ("forward_s", "input_grad_s", "weight_grad_s")
            }
        )
        for stage in problem.stages
    ]
    return replaced(problem, stages=tuple(stages))


@pytest.mark.slow
def test_the_first_answer_comes_before_the_search_and_the_last_is_never_worse():
    memory = two_sites(delay=(2, 0), in_flight=8, chunks=2)
    answers = [*seek(memory, [memory], 0.5)]
    assert [is_last for _, is_last in answers] == [False, True]
    makespans = [simulate(memory, schedule).makespan_s for schedule, _ in answers]
    assert makespans[0] >= makespans[1]
    for schedule, _ in answers:
        check(memory, schedule)


def test_what_is_proven_to_be_best_is_the_last_answer():
    ((schedule, is_last),) = seek(FAR, [FAR], 5.0)
    assert is_last
    assert simulate(FAR, schedule).makespan_s == search(FAR, 5.0).timeline.makespan_s


def test_an_order_without_slack_is_not_the_best_where_durations_vary():
    samples = [varied(FAR, seed, 0.1) for seed in range(4)]
    *_, (robust, _) = seek(FAR, samples, 0.2)
    tight = search(FAR, 0.2).schedule
    assert simulate(FAR, tight).makespan_s < simulate(FAR, robust).makespan_s
    means = [fmean(simulate(sample, schedule).makespan_s for sample in samples) for schedule in (tight, robust)]
    assert means[1] < 0.98 * means[0]


def test_nothing_fits():
    full = replaced(
        FAR,
        ranks=(Rank(memory_bytes=1.0),) * 4,
        stages=tuple(stage.model_copy(update={"activation_bytes": 2.0}) for stage in FAR.stages),
    )
    assert [*seek(full, [full], 1.0)] == [(None, True)]


def test_questions_and_answers_are_lines():
    told = [json.loads(json.dumps(answer)) for answer in answers(prepare, ["{}", *[question(FAR, [FAR], 0.5)] * 2])]
    assert [answer["is_last"] for answer in told] == [True, True]
    check(FAR, Schedule.from_data(told[0]["schedule"]))
