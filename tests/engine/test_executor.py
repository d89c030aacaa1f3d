import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attempts import assert_most_of_five
from farpipe.core.errors import InputError, RunError
from farpipe.core.schedule.library import ORDERS, order
from farpipe.core.step import Hop, Link, Problem, Rank, Schedule, Stage, Transfer
from farpipe.engine.executor.executor import Executor, instructions, received, stage_ranks
from farpipe.engine.stages.stage import SleepStage
from farpipe.engine.stages.tied_weights import EndsExchange, TiedWeights
from in_process import run_ranks
from small_models import (
    GPT,
    LLAMA,
    TIED,
    make_batch,
    make_stages,
    placed_problem,
    reference_step,
    relative_error,
    split_backward,
    whole_model,
)
from strategies import schedules

LIMITS = {torch.float32: 1e-6, torch.float64: 1e-12}

V_SHAPES = {1: (0, 0), 2: (0, 1, 1, 0), 4: (0, 1, 2, 3, 3, 2, 1, 0)}
ROUND_ROBIN = {1: (0, 0), 2: (0, 1, 0, 1), 4: (0, 1, 2, 3, 0, 1, 2, 3)}


def run_pipelined(model, schedule, stages, batch, *, steps=1):
    """Run the schedule, one thread per rank; the loss of the last step. Gradients are left in the stages."""
    ranks = stage_ranks(schedule)
    last = len(stages) - 1

    def tie(peers):
        copies = {}
        if model.tied_embeddings and last > 0:
            copies |= {0: stages[0].module.embedding.weight} if ranks[0] == peers.rank else {}
            copies |= {last: stages[last].module.head.weight} if ranks[last] == peers.rank else {}
        apart = model.tied_embeddings and ranks[0] != ranks[last]
        return TiedWeights(copies, last, EndsExchange(peers, (ranks[0], ranks[last]), last) if apart else None)

    def work(peers):
        mine = {stage: stages[stage] for stage, rank in enumerate(ranks) if rank == peers.rank}
        tied = tie(peers)
        executor = Executor(schedule, mine, peers, tied.stage_done)
        for step in range(steps):
            for stage in mine.values():
                stage.begin_step(batch)
            executor.run(step)
            tied.sum_gradients(step)

    run_ranks(len(schedule.ranks), work)
    return stages[last].loss


def assert_equals_whole(model, schedule, dtype, **options):
    """Loss and all gradients of the pipelined step equal the un-pipelined model's."""
    batch = make_batch(model, schedule.num_microbatches)
    stages = make_stages(model, len(stage_ranks(schedule)), dtype, **options)
    loss = run_pipelined(model, schedule, stages, batch)
    whole = whole_model(model, dtype)
    expected = reference_step(whole, batch)
    assert abs(loss - expected) <= LIMITS[dtype] * abs(expected)
    gradients = {name: p.grad for stage in stages for name, p in stage.module.named_parameters()}
    references = {name: p.grad for name, p in whole.named_parameters()}
    assert references.keys() <= gradients.keys()
    for name, reference in references.items():
        assert relative_error(gradients[name], reference) <= LIMITS[dtype], name
    if model.tied_embeddings and len(stages) > 1:
        assert torch.equal(gradients["embedding.weight"], gradients["head.weight"])
    assert all(stage.store.num_bytes == 0 for stage in stages)


PLACEMENTS = [(0,), (0, 1), (0, 1, 2, 3), *V_SHAPES.values(), *ROUND_ROBIN.values()]


def library_orders():
    """Every order of the library for every placement that it is defined for."""
    for method in ORDERS:
        for placement in dict.fromkeys(PLACEMENTS):
            options = {"extra": 2} if method == "eager" else {}
            with contextlib.suppress(InputError):
                schedule = order(method, placed_problem(placement, 4), **options)
                yield pytest.param(schedule, id=f"{method}-{''.join(map(str, placement))}")


NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=NIGHTLY)])
@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.slow), True], ids=["B", "IW"])
@pytest.mark.parametrize("schedule", [*library_orders()])
def test_every_order_of_the_library_gives_the_gradients_of_the_whole_model(schedule, split, dtype):
    assert_equals_whole(TIED, split_backward(schedule) if split else schedule, dtype)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gpt_like_models_with_tied_weights(num_ranks):
    schedule = order("1f1b", placed_problem(tuple(range(num_ranks)), 3))
    assert_equals_whole(GPT, split_backward(schedule), torch.float64)


@pytest.mark.parametrize(
    "recompute", ["selective", "full", "layernorm", "mlp", "core_attn layernorm", "core_attn layernorm mlp"]
)
def test_recomputation_changes_no_gradient(recompute):
    schedule = order("1f1b", placed_problem((0, 1), 3))
    assert_equals_whole(LLAMA, split_backward(schedule), torch.float64, recompute=recompute)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_valid_order_gives_the_gradients_of_the_whole_model(data):
    placement = data.draw(st.sampled_from([(0,), (0, 1), *V_SHAPES.values(), *ROUND_ROBIN.values(), (1, 0, 1)]))
    problem = placed_problem(placement, data.draw(st.integers(1, 4)))
    dtype = data.draw(st.sampled_from(list(LIMITS)))
    assert_equals_whole(data.draw(st.sampled_from([LLAMA, TIED])), data.draw(schedules(problem)), dtype)


def test_a_second_step_is_not_mixed_up_with_the_first():
    schedule = order("1f1b", placed_problem((0, 1), 3))
    batch = make_batch(LLAMA, 3)
    stages = make_stages(LLAMA, 2, torch.float64)
    once = run_pipelined(LLAMA, schedule, stages, batch)
    twice = run_pipelined(LLAMA, schedule, make_stages(LLAMA, 2, torch.float64), batch, steps=2)
    assert once == twice


def _telling(told, what, call):
    def tell(*inputs, **options):
        told.append(what)
        return call(*inputs, **options)

    return tell


def test_a_stage_is_told_to_begin_before_its_first_and_to_end_after_its_last_action():
    told = []
    problem = placed_problem((0, 0), 2)
    no_time = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), 0.0)
    problem = problem.model_copy(update={"stages": tuple(s.model_copy(update=no_time) for s in problem.stages)})

    def note(word):
        return lambda step, stage: told.append(f"{word} {stage}")

    def work(peers):
        stages = {stage: SleepStage(problem, stage) for stage in range(2)}
        for number, stage in stages.items():
            for name in ("forward", "backward"):
                setattr(stage, name, _telling(told, f"{name} {number}", getattr(stage, name)))
        Executor(order("gpipe", problem), stages, peers, note("end"), note("begin")).run(0)

    run_ranks(1, work)
    for stage in range(2):
        mine = [what for what in told if what.endswith(str(stage))]
        assert mine == [f"begin {stage}", *[f"forward {stage}"] * 2, *[f"backward {stage}"] * 2, f"end {stage}"]


def test_messages_follow_from_the_order():
    schedule = Schedule.from_text(["0F0 0F1 0B0 0B1 3F0", "1F0 2F0 2I0 1B0"], 2)
    program = instructions(schedule, 1)
    assert [(item.source, item.target) for item in program] == [(0, 1), (1, 0), (0, 1), (1, 0)]
    assert [str(item.action) for item in received(program, 1)] == ["1F0", "2I0"]
    assert program[2].waiting_for == "the gradient of microbatch 0 from stage 3 for 2I0"


def test_an_activation_of_the_wrong_shape_is_named():
    schedule = order("gpipe", placed_problem((0, 1), 1))
    stages = make_stages(LLAMA, 2, torch.float32)
    batch = make_batch(LLAMA, 1)
    short = make_batch(LLAMA, 1)
    stages[0].begin_step(type(batch)(short.tokens[:, :, :5], short.targets[:, :, :5]))
    stages[1].begin_step(batch)

    def work(peers):
        Executor(schedule, {peers.rank: stages[peers.rank]}, peers).run(0)

    with pytest.raises(RunError, match=r"rank 1: 1F0: the activation should be \[2, 6, 16\].* but \[2, 5, 16\]"):
        run_ranks(2, work)


def test_a_missing_message_is_named():
    schedule = order("gpipe", placed_problem((0, 1), 1))

    def work(peers):
        if peers.rank == 1:
            Executor(schedule, {1: make_stages(LLAMA, 2, torch.float32)[1]}, peers).run(0)

    with pytest.raises(RunError, match="the activation of microbatch 0 from stage 0 for 1F0"):
        run_ranks(2, work, timeout_s=0.2)


def test_the_share_of_the_cpu_is_that_of_the_actions_alone():
    problem = Problem(
        num_microbatches=1,
        ranks=(Rank(),),
        stages=(Stage(rank=0, forward_s=0.05, input_grad_s=0.0, weight_grad_s=0.0),),
        links={},
        hops=(),
    )
    executed = []
    schedule = Schedule.from_text(["0F0 0B0"], 1)
    run_ranks(1, lambda peers: executed.append(Executor(schedule, {0: SleepStage(problem, 0)}, peers).run(0)))
    assert 0 <= executed[0].cpu_share < 0.3  # it slept


@pytest.mark.slow
@pytest.mark.alone
def test_a_rehearsal_takes_its_time_and_passes_tensors_of_the_right_size():
    link = {"a>b": Link(latency_s=0, bandwidth_bytes_per_s=1e9), "b>a": Link(latency_s=0, bandwidth_bytes_per_s=1e9)}
    stage = {"forward_s": (0.03, 0.01), "input_grad_s": 0.01, "weight_grad_s": 0.02}
    problem = Problem(
        num_microbatches=2,
        ranks=(Rank(), Rank()),
        stages=(Stage(rank=0, **stage), Stage(rank=1, **stage)),
        links=link,
        hops=(Hop(forward=Transfer(link="a>b", bytes=(1000, 2000)), backward=Transfer(link="b>a", bytes=0)),),
    )
    schedule = Schedule.from_text(["0F0 0F1 0B0 0I1 0W1", "1F0 1F1 1B0 1B1"], 2)

    def work(peers):
        return Executor(schedule, {peers.rank: SleepStage(problem, peers.rank)}, peers).run(0)

    def late_s(logs):
        return (logs[0].actions[:, 1] - logs[0].actions[:, 0]) / 1e9 - [0.03, 0.01, 0.03, 0.01, 0.02]

    first, second = assert_most_of_five(lambda _: run_ranks(2, work), lambda logs: max(late_s(logs)) < 0.02)
    assert min(late_s([first])) >= 0
    assert second.messages[:, 4].tolist() == [1000, 2000]
    assert first.messages[:, 4].tolist() == [0, 0]
