"""Grids of a job's inputs, and what is found at a point."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe import planning
from farpipe.core.errors import InputError, UsageError
from farpipe.core.spec import job_of
from farpipe.core.strict import parse_toml
from farpipe.planning.explain.job_grid import Axis, Result, job_points, parse_axis, play_job
from farpipe.planning.planner.batches import plan_batch
from job_files import MODEL_TO_SWEEP, cluster_text

JOB = f"""
{MODEL_TO_SWEEP}
{cluster_text("a", "b.north", device="a100-80gb", num_devices=(2, 2), latency="1 ms", bandwidth="10 Gbit/s")}
"""


@pytest.fixture
def table():
    return parse_toml(JOB, "job.toml")


def put(table, key, value):
    (point,) = job_points(table, [Axis(key, (value,))])
    return point.table


def test_a_grid_has_every_combination_the_last_axis_fastest(table):
    axes = [Axis("training.global_batch", (8, 16)), Axis("cluster.links.latency", ("1 ms", "9 ms"))]
    assert [point.values for point in job_points(table, axes)] == [(8, "1 ms"), (8, "9 ms"), (16, "1 ms"), (16, "9 ms")]


def test_the_table_itself_is_left_alone(table):
    put(table, "cluster.links.latency", "9 ms")
    assert table == parse_toml(JOB, "job.toml")


@pytest.mark.parametrize("name", ["0", "a>b.north", "b.north>a"])
def test_a_link_is_chosen_by_number_or_by_its_ends(table, name):
    table["cluster"]["links"].append({"from": "x", "to": "y", "latency": "5 ms"})
    changed = put(table, f"cluster.links.{name}.latency", "7 ms")
    assert [link["latency"] for link in changed["cluster"]["links"]] == ["7 ms", "5 ms"]


def test_without_a_choice_all_entries_are_changed(table):
    sites = put(table, "cluster.sites.num_devices", 4)["cluster"]["sites"]
    assert [site["num_devices"] for site in sites] == [4, 4]


def test_a_site_is_chosen_by_its_name_even_with_a_dot_in_it(table):
    sites = put(table, "cluster.sites.b.north.num_devices", 4)["cluster"]["sites"]
    assert [site["num_devices"] for site in sites] == [2, 4]


def test_a_preset_that_stands_alone_can_be_added_to(table):
    device = put(table, "cluster.sites.a.device.memory", "40 GiB")["cluster"]["sites"][0]["device"]
    assert device == {"preset": "a100-80gb", "memory": "40 GiB"}


def test_a_table_that_is_missing_is_made(table):
    assert put(table, "layout.tensor", 1)["layout"] == {"tensor": 1}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=1,2", (1, 2)),
        ("k=1 ms, 30 ms", ("1 ms", "30 ms")),
        ("k=true,false", (True, False)),
        ("k=[[4, 4], [2, 6]]", ([4, 4], [2, 6])),
        ("k=llama-3-8b", ("llama-3-8b",)),
        ("k=0.5", (0.5,)),
    ],
)
def test_values_are_toml_or_text(text, values):
    assert parse_axis(text).values == values


@pytest.mark.parametrize("text", ["k", "k=", "=1", "k=1,1", "k=[1,", ""])
def test_what_is_no_axis_is_wrong_usage(text):
    with pytest.raises(UsageError, match="--over"):
        parse_axis(text)


@given(key=st.text(min_size=1), values=st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_any_text_is_an_axis_or_wrong_usage(key, values):
    try:
        assert parse_axis(f"{key}={','.join(values)}").values
    except UsageError as error:
        assert "--over" in str(error)


def test_a_key_below_a_value_and_links_that_are_not_there_are_named(table):
    with pytest.raises(InputError, match=r"training.global_batch is a value, not a table"):
        put(table, "training.global_batch.size", 1)
    with pytest.raises(InputError, match=r"the job has no cluster.links"):
        put(table | {"cluster": {"links": []}}, "cluster.links.latency", "1 ms")


def test_axes_given_twice_and_endless_grids_are_wrong_usage(table):
    with pytest.raises(UsageError, match="twice"):
        job_points(table, [Axis("a", (1,)), Axis("a", (2,))])
    with pytest.raises(UsageError, match="1,000,000 points"):
        job_points(table, [Axis(key, tuple(range(100))) for key in "abc"])


def test_a_point_has_the_same_name_for_the_same_question_only(table):
    same, again = (job_points(table, [Axis("training.global_batch", (8,))])[0].name for _ in range(2))
    assert same == again == job_points(table, [])[0].name
    assert same != job_points(table, [Axis("training.global_batch", (16,))])[0].name


def test_a_point_wins_with_what_the_planner_finds(table):
    found = play_job(job_points(table, [])[0])
    planned = planning.plan(job_of(table, "job"))
    assert found.winner.where == planned.where
    assert found.winner.step_s >= planned.prediction.step_s * (1 - 1e-9)
    assert found.gain >= 1


def test_results_survive_a_round_trip(table):
    found = play_job(job_points(table, [Axis("training.global_batch", (8,))])[0])
    assert Result.from_data(found.to_data(), found.values) == found


def test_a_job_that_fits_nowhere_is_a_result_and_an_impossible_one_an_error(table):
    nowhere = job_points(table, [Axis("cluster.sites.device.memory", ("200 MiB",))])[0]
    found = play_job(nowhere)
    assert (found.winner, found.gain) == (None, None)
    assert found.obstacle
    with pytest.raises(InputError, match="latncy"):
        play_job(job_points(table, [Axis("cluster.links.latncy", ("1 ms",))])[0])


@pytest.mark.slow
def test_a_batch_of_documents_is_planned_at_every_point_cut_as_in_training(table):
    lengths = [5000, 900, 900, 40]
    axes = [Axis("training.sequence_length", (1024, 4096)), Axis("cluster.links.bandwidth", ("1 Gbit/s",))]
    points = job_points(table, axes, lengths)
    assert len({point.name for point in points} | {job_points(table, axes)[0].name}) == 3
    for point, cut in zip(points, (1024, 4096), strict=True):
        found = play_job(point)
        pieces = [min(cut, size - begin) for size in lengths for begin in range(0, size, cut)]
        planned = plan_batch(job_of(dict(point.table), "job"), pieces)
        assert found.winner.step_s == planned.step_s
        assert {one.kind for one in found.strategies} == {"one site", "pipeline", "replicas"}
        assert Result.from_data(found.to_data(), found.values) == found
        by_kind = {one.kind: one for one in reversed(found.strategies)}
        assert by_kind["one site"].inter_site_bytes == 0
        assert by_kind["pipeline"].where == "a > b.north"
        hidden = job_of(dict(point.table), "job").model.hidden
        assert by_kind["pipeline"].inter_site_bytes >= 2 * 2 * hidden * sum(lengths)
