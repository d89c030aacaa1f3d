"""Validation: predicted against measured step times."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from farpipe.core.errors import InputError, ToleranceError
from farpipe.core.units import format_change
from farpipe.planning.cost.trust import families
from farpipe.planning.planner.reference_points import load_points
from farpipe.planning.planner.validation import errors_table, predict, validate, validate_groups

ROOT = Path(__file__).parents[3]
HEADER = "group,model,num_layers,hidden,num_heads,global_batch,microbatch_size,tensor,data,pipeline,step_s\n"
ROW = "vtrain-multi-node,mine,24,2048,16,64,2,2,4,4,{step_s}\n"
GROUP = """
format = "farpipe/points/1"
[[group]]
name = "mine"
tolerance = 0.05
source = "measured at home"
[group.common]
device = "h100"
site_link_latency = "10 us"
site_link_bandwidth = "400 Gbit/s"
vocab_size = 32000
sequence_length = 4096
recompute = "none"
flash_attention = true
data = 2
[[group.points]]
num_layers = 32
hidden = 4096
num_heads = 32
num_kv_heads = 8
ffn_hidden = 14336
gated_mlp = true
tied_embeddings = false
zero1 = true
global_batch = 16
microbatch_size = 1
tensor = 4
pipeline = 2
step_s = 1.0
"""


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def carried():
    return validate()


@pytest.mark.slow
def test_the_carried_points_are_within_tolerance(carried):
    carried.raise_if_failed()
    assert {group.group.name: len(group.results) for group in carried.groups} == {
        "korthikanti-2022": 8,
        "vtrain-multi-node": 18,
        "narayanan-sc21": 5,
        "zero-bubble": 8,
        "h100": 9,
        "torchao": 5,
        "b200": 8,
        "sailor-opt-350-gh200": 15,
        "mlperf-hopper": 5,
        "mlperf-blackwell": 13,
        "mlperf-amd": 2,
        "lora": 33,
        "bridge-dense": 14,
        "bridge-experts": 28,
        "b200-experts": 6,
        "b200-context": 4,
        "settings-and-logs": 12,
    }


@pytest.mark.slow
def test_the_table_of_errors_has_the_carried_logs_as_they_are_predicted_now(carried):
    (group,) = (one for one in carried.groups if one.group.name == "settings-and-logs")
    row = next(one for one in families() if "settings and logs" in one["name"])
    assert (row["mean_error"], row["bias"]) == pytest.approx((group.mean_absolute_error, group.bias), abs=1e-3)


def test_readme_and_status_have_the_table_of_errors_that_validate_prints():
    for page in ("README.md", "docs/status.md"):
        assert errors_table() in (ROOT / page).read_text(encoding="utf-8"), page
    assert "strangers" in errors_table()


@pytest.mark.slow
def test_the_tolerances_are_the_marks_that_the_project_set_itself(carried):
    times = {group.group.name: group.group.tolerance for group in carried.groups}
    assert list(times.values())[:9] == [0.20, 0.04, 0.08, 0.08, 0.08, 0.08, 0.03, 0.08, 0.10]
    assert list(times.values())[9:] == [0.05, 0.08, 0.12, 0.10, 0.10, 0.10, 0.10, 0.06]
    sizes = {group.group.name: group.group.memory_tolerance for group in carried.groups}
    assert {name: size for name, size in sizes.items() if size} == {
        "b200": 0.04,
        "sailor-opt-350-gh200": 0.08,
        "mlperf-hopper": 0.05,
        "mlperf-blackwell": 0.05,
        "lora": 0.06,
        "b200-experts": 0.06,
        "b200-context": 0.05,
    }


@pytest.mark.slow
def test_every_group_names_its_source(carried):
    assert all(len(group.group.source) > 20 for group in carried.groups)


@pytest.mark.slow
def test_a_wrong_reference_fails_the_gate():
    right = load_points()[1]
    wrong = replace(right, points=tuple(p.model_copy(update={"step_s": 1.2 * p.step_s}) for p in right.points))
    report = validate_groups([wrong])
    assert not report.passed
    with pytest.raises(
        ToleranceError, match=r"korthikanti-2022: mean error .* tolerance 4.0 %; worst: GPT-22B t8"
    ) as failure:
        report.raise_if_failed()
    assert failure.value.exit_code == 5
    assert "FAILED" in report.table()


@pytest.mark.slow
def test_one_group_outside_tolerance_is_enough_to_fail():
    first, second = load_points()[1:3]
    report = validate_groups([first, replace(second, tolerance=0.001)])
    assert [group.passed for group in report.groups] == [True, False]
    with pytest.raises(ToleranceError, match="vtrain-multi-node"):
        report.raise_if_failed()


@pytest.mark.slow
def test_the_table_shows_every_point_with_its_error(carried):
    table = carried.table()
    for group in carried.groups:
        for result in group.results:
            assert str(result.point) in table
            assert format_change(result.error) in table


@pytest.mark.slow
def test_the_data_is_json_and_agrees_with_the_report(carried):
    data = json.loads(json.dumps(carried.to_data()))
    assert data["passed"] is True
    for group, result in zip(data["groups"], carried.groups, strict=True):
        errors = [point["predicted_s"] / point["measured_s"] - 1 for point in group["points"]]
        assert group["mean_absolute_error"] == pytest.approx(sum(map(abs, errors)) / len(errors))
        assert group["bias"] == pytest.approx(result.bias)


def test_a_csv_file_takes_what_it_has_no_column_for_from_the_group_it_names(tmp_path):
    report = validate(written(tmp_path, "points.csv", HEADER + ROW.format(step_s=1.0) * 2))
    group = report.groups[0]
    assert (group.group.tolerance, len(group.results)) == (0.08, 2)
    point = group.results[0].point
    assert (point.recompute, point.device, point.sequence_length) == ("full", "a100-80gb", 2048)
    assert group.results[0].predicted_s == predict(point).step_s


def test_a_csv_row_may_override_the_group(tmp_path):
    text = HEADER.replace("step_s", "step_s,recompute,sequence_parallel") + ROW.format(step_s="1.0,selective,true")
    point = load_points(written(tmp_path, "points.CSV", text))[0].points[0]
    assert (point.recompute, point.sequence_parallel) == ("selective", True)


def test_a_prediction_that_is_right_passes(tmp_path):
    first = validate(written(tmp_path, "guess.csv", HEADER + ROW.format(step_s=1.0)))
    assert not first.passed
    right = first.groups[0].results[0].predicted_s
    validate(written(tmp_path, "right.csv", HEADER + ROW.format(step_s=right))).raise_if_failed()


def test_a_toml_file_has_groups_of_its_own(tmp_path):
    group = validate(written(tmp_path, "points.toml", GROUP)).groups[0]
    assert (group.group.name, group.group.tolerance) == ("mine", 0.05)
    assert 0.1 < group.results[0].predicted_s < 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("tolerance = 0.05", "tolerance = 2"), r"group\[0\].tolerance: .*less than 1"),
        (("zero1 = true", "zeroo = 1"), r"group\[0\].points\[0\].zeroo: unknown key; did you mean 'zero'"),
        (("hidden = 4096", "hidden = -1"), r"points\[0\].hidden: .*greater than or equal to 1, found -1"),
        (('"h100"', '"h10"'), r"points\[0\].device: there is no device 'h10' in the catalogue; did you mean"),
        (("global_batch = 16", "global_batch = 15"), r"points\[0\].global_batch: 15 is not a multiple of 2 sequences"),
        (("num_heads = 32", "num_heads = 33"), r"points\[0\].hidden: 4096 is not a multiple of num_heads 33"),
        (
            ('recompute = "none"', 'recompute = "some"'),
            r"points\[0\].recompute: expected 'none', 'full', 'op', 'selective' or some of core_attn, .*found 'some'",
        ),
        (("points/1", "points/2"), "expected 'farpipe/points/1'"),
        (("step_s = 1.0", ""), "step_s: missing"),
        (("tensor = 4", "tensor = 3"), r"points\[0\].tensor: 3 does not divide model.num_heads 32; 1, 2, 4, .*would"),
        (("tensor = 4", "tensor = 4\ncontext = 3"), r"points\[0\].context: 3 does not divide .* 4096; 2 and 4 would"),
        (("tensor = 4", "tensor = 4\nexpert = 2"), r"points\[0\].expert: GPT has no experts"),
        (("tensor = 4", "tensor = 4\nlayers = [16, 15]"), r"points\[0\].layers: they sum to 31, the model has 32"),
        (
            ("tensor = 4", "tensor = 4\nlayers = [32]"),
            r"points\[0\].layers: a list of 1 does not fit",
        ),
        (("step_s = 1.0", "step_s = 1.0\nmemory_rank = 99"), r"points\[0\].memory_rank: the last of \d+ ranks? is"),
        (
            ("step_s = 1.0", "step_s = 1.0\ncpu_offloading_num_layers = 99"),
            "cpu_offloading_num_layers: .* has 32 layers",
        ),
        (("step_s = 1.0", "step_s = 1.0\nwindow_attn_skip_freq = 2"), "there is no sliding_window"),
        (("step_s = 1.0", "step_s = 1.0\nsliding_window = 8\nwindow_attn_skip_freq = [1]"), "1 entries for num_layers"),
    ],
)
def test_a_bad_toml_file_is_an_error_that_names_the_place(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        load_points(written(tmp_path, "points.toml", GROUP.replace(*change)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER, "there is no point in it"),
        (HEADER + ROW.replace("multi", "mutli").format(step_s=1), "line 2: group: .* did you mean 'vtrain-multi-node'"),
        (HEADER + ROW.format(step_s="1,2"), "line 2: not as many cells as the header has"),
        (HEADER + "vtrain-multi-node,mine\n", "line 2: not as many cells as the header has"),
        (HEADER + ROW.format(step_s=1) + ROW.format(step_s="nan"), "line 3.step_s: expected a finite number"),
        (HEADER.replace("step_s", "step_s,virtual") + ROW.format(step_s='1,"[1,"'), "line 2.virtual: not TOML: "),
        (HEADER.replace("hidden", "hiden") + ROW.format(step_s=1), "line 2.hiden: unknown key; did you mean 'hidden'"),
    ],
)
def test_a_bad_csv_file_is_an_error_that_names_the_line(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_points(written(tmp_path, "points.csv", text))


def test_a_point_has_the_windows_of_its_model_unless_it_says_otherwise(tmp_path):
    head = "group,preset,sliding_window,global_batch,microbatch_size,tensor,data,pipeline,step_s\n"
    rows = [f"b200-context,gpt-oss-20b,{window},8,1,1,8,1,1.0\n" for window in ("", "32768")]
    group = validate(written(tmp_path, "points.csv", head + "".join(rows))).groups[0]
    local, whole = group.results
    assert (local.point.sliding_window, local.point.window_attn_skip_freq) == (128, 2)
    assert local.predicted_s < 0.9 * whole.predicted_s


def test_layers_that_the_stages_do_not_divide_go_to_the_first_stages():
    point = load_points()[0].points[0].model_copy(update={"num_layers": 10, "pipeline": 4})
    assert [stage.num_layers for stage in point.job().placements] == [3, 3, 2, 2]


def test_a_point_may_have_the_shape_of_a_model_of_the_catalogue(tmp_path):
    head = "group,preset,experts,global_batch,microbatch_size,tensor,data,pipeline,step_s\n"
    row = 'b200-context,qwen3-30b-a3b,"{ num_experts = 64, per_token = 8, ffn_hidden = 768 }",8,1,1,8,1,1.0\n'
    (group,) = load_points(written(tmp_path, "points.csv", head + row))
    point = group.points[0]
    assert (point.model, point.num_layers, point.head_dim, point.gated_mlp) == ("qwen3-30b-a3b", 48, 128, True)
    assert point.experts.num_experts == 64
    bad = written(tmp_path, "bad.csv", head + row.replace("qwen3-30b-a3b", "qwen3-30b"))
    with pytest.raises(InputError, match=r"line 2\.preset: there is no model 'qwen3-30b'"):
        load_points(bad)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('recompute = "mla_up_proj"', "recompute: the layers of GPT have no mla_up_proj; they have core_attn"),
        ('lora = { rank = 8, target_modules = ["linear_q_proj"] }', "lora: the layers of GPT have no linear_q_proj"),
    ],
)
def test_a_point_of_a_part_that_its_model_lacks_is_an_input_error(tmp_path, more, message):
    text = GROUP.replace('recompute = "none"', "") if more.startswith("recompute") else GROUP
    with pytest.raises(InputError, match=message):
        load_points(written(tmp_path, "mine.toml", text.replace("[[group.points]]", f"{more}\n[[group.points]]")))
