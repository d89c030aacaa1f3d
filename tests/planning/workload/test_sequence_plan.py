"""Plans of whole batches: every token once, memory kept, no part of the method in vain, told where impossible."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import event

from farpipe.core.errors import InfeasibleError, InputError
from farpipe.core.schedule import check, peak_memory_bytes
from farpipe.core.simulate import simulate
from farpipe.core.spec import Cluster, Job, Model, Pins, Training, preset_model, preset_site
from farpipe.core.step import Problem, Schedule
from farpipe.planning.cost.chunk_laws import Law, Laws
from farpipe.planning.workload import (
    BatchOptions,
    Chunk,
    candidate_cuts,
    chunk_costs,
    followed,
    plan_sequences,
    plan_with_cut,
    sequence_plan,
    step_plan,
)
from farpipe.planning.workload.checkpointing import token_limit
from planning.workload.batches import costs, mixed
from sound_chunks import check_chunks

GIB = 2.0**30


def sound(plan, lengths):
    """Everything that must hold of a plan, recomputed from what it says."""
    check_chunks(plan.chunks, lengths)
    assert [index for pipeline in plan.pipelines for index in pipeline.chunks] == list(range(len(plan.chunks)))
    total_s = 0.0
    for pipeline in plan.pipelines:
        check(pipeline.problem, pipeline.schedule)
        total_s += simulate(pipeline.problem, pipeline.schedule).makespan_s
    assert plan.step_s == pytest.approx(total_s + plan.overhead_s)


@pytest.fixture(scope="module")
def roomy():
    return costs()


@pytest.fixture(scope="module")
def tight():
    return costs(memory_bytes=30 * GIB)


def test_no_batch_is_cut_twice_alike(roomy, monkeypatch):
    cuts, cut_batch = [], candidate_cuts.cut_batch
    monkeypatch.setattr(candidate_cuts, "cut_batch", lambda *asked: cuts.append(asked[1]) or cut_batch(*asked))
    plan_sequences(roomy, [8192, *mixed(20, 4096)], BatchOptions(num_slices=1))
    assert len(cuts) == len(set(cuts)) > 1


@pytest.mark.parametrize("num_slices", [None, 1, 3])
def test_chunks_that_take_only_a_fixed_time_are_planned(roomy, num_slices):
    fixed = Laws(*(Law(fixed_s=1e-3) for _ in range(3)))
    stages = tuple(replace(stage, laws=fixed, layer=fixed) for stage in roomy.stages)
    lengths = mixed(20, 4096)
    sound(plan_sequences(replace(roomy, stages=stages), lengths, BatchOptions(num_slices)), lengths)


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(st.lists(st.integers(1, 65_536), min_size=1, max_size=40), st.booleans())
def test_plans_are_sound(roomy, tight, lengths, little):
    sound(plan_sequences(tight if little else roomy, lengths), lengths)


AGAIN = """
import hashlib, json
from farpipe.planning.workload import BatchOptions, plan_sequences, step_plan
from planning.workload.batches import costs, mixed
for layout in ({}, {"virtual": 2}):
    of = costs(pipeline=2, layout=layout, memory_bytes=26 * 2.0**30)
    plan = plan_sequences(of, mixed(24, 16384))
    print(hashlib.sha256(step_plan(plan).to_json().encode()).hexdigest(), plan.step_s.hex())
"""


@pytest.mark.slow
def test_two_processes_plan_the_same_to_the_last_bit():
    def told(seed):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        command = [sys.executable, "-c", AGAIN]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environment).stdout

    assert told("1") == told("2") != ""


@pytest.mark.slow
def test_the_same_batch_gives_the_same_plan(tight):
    lengths = mixed(32)
    one, two = (plan_sequences(tight, lengths) for _ in range(2))
    assert one.chunks == two.chunks
    assert [p.schedule for p in one.pipelines] == [p.schedule for p in two.pipelines]
    assert one.step_s == two.step_s


@pytest.mark.slow
def test_cutting_searching_and_recomputing_by_chunk_each_help(tight):
    lengths = mixed(40)
    best = plan_sequences(tight, lengths)
    worse = [BatchOptions(num_slices=n) for n in (2, 40)]
    worse += [BatchOptions(checkpointing=rule) for rule in ("uniform", "full")]
    worse += [BatchOptions(rule="literal")]
    for options in worse:
        try:
            assert best.step_s <= plan_sequences(tight, lengths, options).step_s * 1.005
        except InfeasibleError:
            continue


@pytest.mark.slow
def test_less_memory_never_makes_a_step_faster():
    lengths = mixed(24)
    times = [plan_sequences(costs(memory_bytes=gib * GIB), lengths).step_s for gib in (80, 40, 28)]
    assert times[0] <= times[1] * 1.02
    assert times[1] <= times[2] * 1.02


def test_far_sites_cost_little_when_warm_up_hides_the_link():
    lengths = mixed(96)
    near = plan_sequences(costs(), lengths)
    far, plain = (
        plan_sequences(costs(latency_s=0.05), lengths, BatchOptions(hide_links=hide)) for hide in (True, False)
    )
    assert far.step_s <= near.step_s * 1.25
    assert far.step_s <= plain.step_s


def test_a_sequence_that_fits_in_no_number_of_slices_is_told_with_numbers():
    with pytest.raises(
        InfeasibleError, match=r"5000000 tokens does not fit in any number of slices.*at most \d+ tokens"
    ):
        plan_sequences(costs(5_000_000), [5_000_000])
    with pytest.raises(InfeasibleError, match="no memory left"):
        plan_sequences(costs(memory_bytes=4 * GIB), [100])


@pytest.mark.slow
def test_the_longest_sequence_that_is_said_to_fit_does_in_slices_but_not_whole(tight):
    with pytest.raises(InfeasibleError) as told:
        plan_sequences(tight, [50_000_000])
    most = int(str(told.value).split("at most ")[1].split()[0])
    assert token_limit(tight, 1000) < most
    with pytest.raises(InfeasibleError, match=r"does not fit in any number"):
        plan_sequences(tight, [most + 10])
    with pytest.raises(InfeasibleError, match=r"take \d+ slices"):
        plan_sequences(tight, [most], BatchOptions(num_slices=1))
    sound(plan_sequences(tight, [int(most * 0.9)]), [int(most * 0.9)])


@pytest.mark.parametrize("lengths", [[1], [1, 1], [1] * 300, [7, 65536], [65536] * 3, list(range(1, 200))])
def test_odd_batches(roomy, lengths):
    sound(plan_sequences(roomy, lengths), lengths)


@pytest.mark.slow
def test_a_hundred_thousand_tiny_sequences(roomy):
    lengths = np.full(100_000, 3)
    plan = plan_sequences(roomy, lengths)
    check_chunks(plan.chunks, lengths.tolist())
    assert len(plan.chunks) < 500


def test_sequences_stay_whole_where_they_are_told_to(roomy):
    lengths = mixed(40)
    plan = plan_sequences(roomy, lengths, BatchOptions(num_slices=1))
    sound(plan, lengths)
    assert {chunk.kind for chunk in plan.chunks} == {"batched"}
    assert plan.step_s >= plan_sequences(roomy, lengths).step_s


def test_an_empty_batch_and_pinned_slices(roomy):
    with pytest.raises(InputError, match="at least one"):
        plan_sequences(roomy, [])
    assert plan_sequences(roomy, [60_000, 100], BatchOptions(num_slices=6)).num_slices == 6
    with pytest.raises(InfeasibleError, match=r"50 slices: the longest sequence has 3 tokens.*take at most 3"):
        plan_sequences(roomy, [1, 3], BatchOptions(num_slices=50))


@pytest.mark.slow
def test_a_recomputed_layer_keeps_its_attention_where_that_is_faster_and_fits():
    """Of a model with long sequences it is; where memory is shorter still, all has to be computed again."""
    long = [60_000] * 3
    for gib, keeps in ((22, True), (17.5, False)):
        of = costs(memory_bytes=gib * GIB)
        plan, plain = plan_sequences(of, long), plan_sequences(of, long, BatchOptions(may_keep_attention=False))
        assert (plan.keeps_attention, plain.keeps_attention) == (keeps, False)
        assert plan.pipelines[0].recomputed.any()
        assert plan.step_s < plain.step_s if keeps else plan.step_s == plain.step_s
        step, kind = step_plan(plan), of.keeping_attention if plan.keeps_attention else of
        load = plan.batch.load
        assert step.problem(of).to_data() == kind.problem(load, plan.batch.follows, step.recomputed).to_data()
    full = plan_sequences(costs(memory_bytes=22 * GIB), long, BatchOptions(checkpointing="full"))
    assert not full.keeps_attention


@pytest.mark.slow
def test_json_has_the_keys_that_others_read(tight):
    lengths = mixed(40)
    data = json.loads(json.dumps(plan_sequences(tight, lengths).to_data()))
    chunks = [Chunk.from_data(chunk) for chunk in data["chunks"]]
    check_chunks(chunks, lengths)
    assert sorted(index for pipeline in data["pipelines"] for index in pipeline) == list(range(len(chunks)))
    peaks, seconds = [], data["overhead_s"]
    for numbers, problem, schedule, layers in zip(
        data["pipelines"], data["problems"], data["schedules"], data["recomputed_layers"], strict=True
    ):
        read, order = Problem.from_data(problem), Schedule.from_data(schedule)
        if "follows" in Problem.model_fields:
            assert (read.follows or (None,) * len(numbers)) == followed([chunks[i] for i in numbers])
        assert np.shape(layers) == (read.num_stages, len(numbers))
        assert isinstance(data["keeps_attention"][len(peaks)], bool)
        peaks.append(peak_memory_bytes(read, order))
        seconds += simulate(read, order).makespan_s
    assert data["peak_memory_bytes"] == pytest.approx([max(each) for each in zip(*peaks, strict=True)])
    assert data["step_s"] == pytest.approx(seconds)
    assert data["planning_s"] > 0


def test_where_no_slices_of_equal_time_fit_slices_of_equal_tokens_do(monkeypatch):
    """Long sequences one after the other: of equal time, longer slices come in than go out."""
    short = costs(memory_bytes=17 * GIB)
    with pytest.raises(InfeasibleError) as told:
        token_limit(short, 10**9)
    fits = int(re.search(r"at most (\d+) tokens fit", str(told.value))[1])
    lengths = [int(0.97 * fits)] * 2
    options = BatchOptions(several_pipelines=False)
    sound(plan_sequences(short, lengths, options), lengths)
    monkeypatch.setattr(sequence_plan, "_finer", lambda *_: [])
    with pytest.raises(InfeasibleError, match="it recomputes every layer"):
        plan_sequences(short, lengths, options)


def short_of_memory():
    """Llama 13B on eight stages of four A100 with 27 % of their memory."""
    site = preset_site("a", "a100-80gb", 32)
    device = site.device.model_copy(update={"memory_bytes": 0.269 * site.device.memory_bytes})
    job = Job(
        model=preset_model("llama-2-13b"),
        training=Training(sequence_length=98304, global_batch=512, zero1=True),
        cluster=Cluster(sites=(site.model_copy(update={"device": device}),)),
        layout=Pins(pipeline=8),
    )
    return chunk_costs(job, 98304, 4)


def test_where_slices_are_recomputed_equal_tokens_are_tried_too():
    """The first slices of equal time are the longest, and one device has no room for all that they hold."""
    job = Job(
        model=preset_model("llama-3.2-3b"),
        training=Training(sequence_length=32768, global_batch=8, zero=1),
        cluster=Cluster(sites=(preset_site("a", "a100-80gb", 1),)),
    )
    of_one, lengths = chunk_costs(job, 32768), [32768, 915, 32768, 30380]
    free, by_tokens = (plan_sequences(of_one, lengths, options) for options in (None, BatchOptions(equal="tokens")))
    limit = sequence_plan.token_limit(of_one, 32768)
    search = partial(sequence_plan._best_cut, of_one, np.array(lengths), limit, BatchOptions())
    by_time = search()
    assert free.step_s == by_tokens.step_s < 0.97 * by_time.step_s
    with pytest.raises(InfeasibleError, match="estimated"):  # and is not planned where it can't be faster
        search(below_s=0.9 * by_time.step_s)
    assert free.cut.equal == "tokens"
    assert plan_with_cut(of_one, lengths, free.cut).chunks == free.chunks


def test_a_sequence_that_fits_whole_but_in_no_slices_stays_whole():
    """Slices keep keys, values and their gradients although they recompute; a whole sequence keeps inputs only."""
    lengths = [51402, 13197]
    plan = plan_sequences(short_of_memory(), lengths)
    sound(plan, lengths)
    assert plan.num_slices == 1
    with pytest.raises(InfeasibleError):
        plan_sequences(short_of_memory(), lengths, BatchOptions(num_slices=8))


@pytest.mark.parametrize(
    ("num_heads", "context", "takes"),
    [(52, 8, "1, 2, 4"), (52, 13, "1, 2, 4"), (40, 5, "1, 2, 4, 8"), (32, 3, "1, 2, 4, 8, 16, 32")],
)
def test_devices_that_share_chunks_divide_heads_and_devices(num_heads, context, takes):
    """As `plan` has it of ulysses; and no devices of a site are left over without a word."""
    asked = Job(
        model=Model(num_layers=8, hidden=128 * num_heads, num_heads=num_heads, ffn_hidden=1024, vocab_size=1000),
        training=Training(sequence_length=4096, global_batch=8),
        cluster=Cluster(sites=(preset_site("a", "a100-80gb", 32),)),
    )
    with pytest.raises(InputError, match=rf"{num_heads} heads and .* \(32\); take {takes}$"):
        chunk_costs(asked, 4096, context)
    assert chunk_costs(asked, 4096, 4).context == 4
    assert chunk_costs(asked.model_copy(update={"layout": Pins(context=2)}), 4096).context == 2


def test_zero_that_is_left_open_is_what_the_planner_takes():
    """ZeRO-1 over the devices that share a stage."""
    free, first = ({rank.static_bytes for rank in costs(context=8, **zero).base.ranks} for zero in ({}, {"zero": 1}))
    assert free == first
    assert free != {rank.static_bytes for rank in costs(context=8, zero=0).base.ranks}


@pytest.mark.slow
def test_plans_do_not_depend_on_the_clock(monkeypatch):
    """A machine on which every look at the clock takes a minute finds the same plan."""
    lengths = mixed(32, 45_000)
    quick = plan_sequences(short_of_memory(), lengths)
    ticks = itertools.count(0, 60)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    slow = plan_sequences(short_of_memory(), lengths)
    assert (slow.chunks, slow.step_s) == (quick.chunks, quick.step_s)
    limited = plan_sequences(short_of_memory(), lengths, BatchOptions(limit_s=1.0))
    assert limited.step_s > quick.step_s


def test_compiling_is_no_planning(roomy, monkeypatch):
    search = sequence_plan._searched

    def compiling(*asked):
        with event.trigger_event("numba:compile"):
            time.sleep(0.5)
        return search(*asked)

    monkeypatch.setattr(sequence_plan, "_searched", compiling)
    assert plan_sequences(roomy, [8, 4]).planning_s < 0.4


def test_short_sequences_fill_chunks_no_further_than_the_longest_has_tokens():
    """In the time of a long sequence short ones have several times its tokens, and would be recomputed."""
    job = Job(
        model=preset_model("llama-2-7b"),
        training=Training(sequence_length=262144, global_batch=401, zero=3),
        cluster=Cluster(sites=(preset_site("a", "a100-80gb", 32),)),
        layout=Pins(pipeline=1),
    )
    plan = plan_sequences(chunk_costs(job, 262144, 32), [262144] + [3000] * 400)
    assert plan.num_slices == 1
    assert sum(int(pipeline.recomputed.sum()) for pipeline in plan.pipelines) == 0
    assert plan.step_s < 24.3
