"""[training.local_steps] of a job, and when its fragments travel."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InputError
from farpipe.core.spec import LocalSteps, parse_job
from job_files import SMALL_MODEL

JOB = (
    SMALL_MODEL
    + """
[training]
sequence_length = 16
global_batch = 8
precision = "fp32"
[training.local_steps]
{local}
[[cluster.sites]]
name = "zurich"
device = "a100-40gb"
num_devices = 1
[[cluster.sites]]
name = "lugano"
device = "a100-40gb"
num_devices = 2
[[cluster.links]]
{ends}
latency = "20 ms"
bandwidth = "1 Gbit/s"
{rest}
"""
)
BETWEEN = 'between = ["zurich", "lugano"]'


def job(local="every = 30", rest="", ends=BETWEEN):
    return parse_job(JOB.format(local=local, rest=rest, ends=ends))


def test_the_table_is_read_and_written_again():
    text = 'every = 30\nfragments = 3\ndelay_steps = 3\nkeep_local = 0.5\nwire_type = "int4"\nmomentum = 0.9'
    asked = job(text)
    found = asked.training.local_steps
    assert found == LocalSteps(
        every=30, fragments=3, delay_steps=3, keep_local=0.5, wire_type="int4", learning_rate=1.0, momentum=0.9
    )
    assert parse_job(asked.model_copy(update={"text": ""}).to_toml()).training.local_steps == found


@pytest.mark.parametrize(
    ("local", "said"),
    [
        ("every = 0", "training.local_steps.every"),
        ("every = 2\nfragments = 3", "3 can't each have a step of their own within every 2"),
        ("every = 4\ndelay_steps = 4", "4 is not less than every 4"),
        ("keep_local = 1.0", "training.local_steps.keep_local"),
        ('wire_type = "fp4"', "training.local_steps.wire_type"),
        ("learning_rate = 0", "training.local_steps.learning_rate"),
        ("momentum = 1", "training.local_steps.momentum"),
        ("quorum = 0", "training.local_steps.quorum"),
        ("quorum = 1", "a quorum of 1 among 2 sites"),
        ("quorum = 3", "a quorum of 3 among 2 sites; 2 to 2 can be one"),
        ("quorum = 2\ngrace_s = -1", "training.local_steps.grace_s"),
        ("grace_s = 1", "set quorum as well"),
        ("evry = 3", "did you mean 'every'"),
    ],
)
def test_impossible_values_are_refused_by_name(local, said):
    with pytest.raises(InputError, match=said.replace(".", r"\.")):
        job(local)


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ('[data]\npacking = "elastic"', "without data.packing"),
        ("[run]\nreplan = true", "without run.replan"),
        ('[layout]\nreplicas = "inside"', 'without layout.replicas = "inside"'),
        ("[layout]\nlayers = [1, 1]", "without layout.layers"),
        ('[layout]\nsites = ["zurich"]', "zurich has no other site to exchange with"),
    ],
)
def test_what_does_not_go_with_local_steps_is_named(rest, said):
    with pytest.raises(InputError, match=f"training.local_steps: .*{said}"):
        job(rest=rest)


def test_sites_without_a_link_can_t_exchange():
    with pytest.raises(InputError, match="there is no link from lugano to zurich"):
        job(ends='from = "zurich"\nto = "lugano"')


@st.composite
def settings_of_rhythm(draw):
    every = draw(st.integers(1, 12))
    return LocalSteps(every=every, fragments=draw(st.integers(1, every)), delay_steps=draw(st.integers(0, every - 1)))


@settings(deadline=None)
@given(local=settings_of_rhythm())
def test_every_fragment_travels_once_in_every_period_and_is_merged_before_it_does_so_again(local):
    sent = {f: [n for n in range(4 * local.every + 1) if f in local.sent_after(n)] for f in range(local.fragments)}
    for times in sent.values():
        assert len(times) == 4
        assert {later - earlier for earlier, later in pairwise(times)} == {local.every}
        assert all(0 < at <= local.every for at in times[:1])
    for f, times in sent.items():
        merged = [n for n in range(5 * local.every) if f in local.merged_after(n)]
        assert merged[:4] == [at + local.delay_steps for at in times]
    assert max(times[-1] for times in sent.values()) == 4 * local.every, "the last fragment ends the period"


@pytest.mark.parametrize(("wire_type", "expected"), [("none", 4), ("bf16", 2), ("int8", 1.03125), ("int4", 0.53125)])
def test_bytes_of_a_parameter_count_its_part_of_a_scale(wire_type, expected):
    assert LocalSteps(wire_type=wire_type).bytes_per_param == expected


@pytest.mark.parametrize("key", ["elastic", "mirror"])
def test_sites_with_local_steps_keep_their_checkpoints_and_return_by_themselves(key):
    with pytest.raises(InputError, match=f"training.local_steps: .*without training.{key}"):
        parse_job(
            JOB.format(local="", rest="", ends=BETWEEN).replace(
                "[training.local_steps]", f"{key} = true\n[training.local_steps]"
            )
        )
