import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from farpipe.core.simulate import simulate, slack
from farpipe.core.simulate.events import OuterArrival
from farpipe.core.simulate.timeline import MESSAGE_DTYPE, MESSAGE_KINDS
from farpipe.core.step import Sync, Transfer
from farpipe.core.units import format_seconds
from farpipe.report.gantt import Panel, draw_gantt, draw_small_multiples
from farpipe.report.gantt_frame import MAX_BOXES, choose_frame
from report.steps import as_measured, play, sites_of, two_sites
from strategies import problems_with_schedules

SVG = "{http://www.w3.org/2000/svg}"
SOME = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ACTION = re.compile(r"\d+[FIWB]\d+ · ")


def parsed(figure):
    return ElementTree.fromstring(figure.svg())


def boxes(tree, pattern):
    """(title, element) of every box whose title matches."""
    found = [(rect.findtext(f"{SVG}title") or "", rect) for rect in tree.iter(f"{SVG}rect")]
    return [(title, rect) for title, rect in found if re.match(pattern, title)]


def texts(tree):
    return ["".join(element.itertext()) for element in tree.iter(f"{SVG}text")]


def test_every_action_has_a_box_as_long_as_it_lasts():
    timeline = play(two_sites(2, 3))
    panel = Panel("predicted", timeline)
    scale = choose_frame([panel], None, "").scale
    drawn = {title.split(" · ")[0]: rect for title, rect in boxes(parsed(draw_gantt([panel])), ACTION)}
    assert len(drawn) == len(timeline.actions)
    for action in timeline.actions:
        rect = drawn[timeline.label(action)]
        assert float(rect.get("x")) == pytest.approx(scale(action["start_s"]), abs=0.01)
        end = float(rect.get("x")) + float(rect.get("width"))
        assert end == pytest.approx(scale(action["end_s"]), abs=0.75)  # a seam is left between neighbours
        assert rect.get("class") == timeline.label(action)[1] + "0"


def test_titles_tell_start_end_and_duration():
    tree = parsed(draw_gantt([Panel("predicted", play(two_sites(2, 1)))]))
    titles = [title for title, _ in boxes(tree, "")]
    assert "1F0 · 1.75 s to 2.75 s (1.00 s)" in titles
    assert "waits 750 ms for a message from east to west" in titles
    critical = "no slack: were it later, the step would be longer"
    on_link = "on the link 1.000 s to 1.250 s (250 ms) · arrives at 1.750 s"
    assert f"forward of stage 0, microbatch 0, rank 0 to rank 1 · 1 B · {on_link} · {critical}" in titles


def test_messages_are_drawn_by_their_slack_and_the_legend_says_how():
    panel = Panel("predicted", play(two_sites(2, 3)))
    tree = parsed(draw_gantt([panel]))
    drawn = {title.split(" · ")[0]: (title, rect.get("class")) for title, rect in boxes(tree, "(for|back)ward of")}
    found = slack(panel.timeline)
    assert set(found.critical_messages.tolist()) == {True, False}
    critical = found.critical_messages.tolist()
    for message, late_s, is_critical in zip(panel.timeline.messages, found.messages_s, critical, strict=True):
        kind = MESSAGE_KINDS[message["kind"]]
        ends = f"rank {message['source']} to rank {message['target']}"
        title, classes = drawn[f"{kind} of stage {message['stage']}, microbatch {message['microbatch']}, {ends}"]
        is_spare = late_s >= message["arrival_s"] - message["start_s"]
        strength = ["critical"] if is_critical else ["spare"] if is_spare else []
        assert classes.split() == [kind, *strength]
        assert title.endswith("would be longer" if is_critical else f" · slack {format_seconds(late_s)}")
    assert "no slack: the step waits for it" in texts(tree)


def test_the_slack_of_what_was_measured_is_not_drawn():
    tree = parsed(draw_gantt([Panel("measured", as_measured(play(two_sites(2, 3))))]))
    assert {rect.get("class") for _, rect in boxes(tree, "(for|back)ward of")} == {"forward", "backward"}
    assert not [text for text in [*texts(tree), *(title for title, _ in boxes(tree, ""))] if "slack" in text]


def test_predicted_and_measured_stand_on_one_time_axis():
    problem = two_sites(2, 2)
    fast, slow = play(problem), as_measured(play(two_sites(2, 2, latency_s=4.0)))
    tree = parsed(draw_gantt([Panel("predicted", fast), Panel("measured", slow)]))
    starts = [float(rect.get("x")) for title, rect in boxes(tree, r"0F1 ")]
    assert starts[0] == starts[1]
    assert texts(tree).count("0") == 1 + 2 * 4  # one axis that begins at 0; microbatch 0 in F and B of both ranks


def test_messages_of_sites_outside_have_a_row_and_a_box_from_arrival_until_they_are_needed():
    timeline = play(two_sites(2, 3))
    end = timeline.makespan_s
    outer = (OuterArrival("fragment 0", "lugano", 2e6, -1.0, 2 * end), OuterArrival("sum", "bern", 4e6, end, end / 2))
    panel = Panel("measured", dataclasses.replace(timeline, outer=outer))
    frame, tree = choose_frame([panel], None, ""), parsed(draw_gantt([panel]))
    ((slack_title, box),) = boxes(tree, "fragment 0 from lugano")
    assert slack_title == f"fragment 0 from lugano · 1.91 MiB · slack {format_seconds(2 * end + 1)}"
    assert float(box.get("x")) == pytest.approx(frame.scale.start, abs=0.01), "it was there before the step began"
    assert float(box.get("width")) == pytest.approx(frame.scale.end - frame.scale.start, abs=0.01)
    ((wait_title, wait),) = boxes(tree, "sum from bern")
    assert wait_title.endswith(f"waited {format_seconds(end / 2)} for it")
    assert "across" in wait.get("fill")
    assert all(any(text.endswith(name) for text in texts(tree)) for name in ("from lugano", "from bern"))


def test_virtual_stages_have_their_own_shade_and_the_legend_says_so():
    tree = parsed(draw_gantt([Panel("predicted", play(two_sites(2, 2, per_rank=2), "interleaved"))]))
    assert {rect.get("class") for _, rect in boxes(tree, r"[01]F")} == {"F0"}
    assert {rect.get("class") for _, rect in boxes(tree, r"[23]F")} == {"F1"}
    assert "lighter: a later stage of its rank" in texts(tree)


def test_a_wait_between_sites_is_hatched_unlike_one_inside_a_site():
    tree = parsed(draw_gantt([Panel("predicted", play(two_sites(4, 4)), sites_of(4))], key="k"))
    fills = {title.split(" for ")[1]: rect.get("fill") for title, rect in boxes(tree, "waits ")}
    assert fills["a message from east to west"] == fills["a message from west to east"] == "url(#k-across)"
    patterns = {pattern.get("id") for pattern in tree.iter(f"{SVG}pattern")}
    assert patterns == {"k-across", "k-inside"}


def test_the_legend_names_only_what_is_drawn():
    problem = two_sites(6, 4)
    reduce = Sync(reduce=Transfer(link="east:0>east:1", bytes=1.0))  # inside a site, whose links are not drawn
    with_sync = problem.model_copy(update={"sync": (reduce, None, None, None, None, None)})
    named = texts(parsed(draw_gantt([Panel("predicted", play(with_sync))])))
    assert "activation on its link" in named
    assert "gradients reduced" not in named
    assert "W gradient of the weights" not in named


def test_the_site_of_ranks_is_named_once():
    tree = parsed(draw_gantt([Panel("predicted", play(two_sites(4, 2)), sites_of(4))]))
    named = [text.removeprefix(site) for site in ("east", "west") for text in texts(tree) if text == site + site]
    assert len(named) == 2  # as text and as its title


def test_names_from_users_are_escaped():
    tree = parsed(draw_gantt([Panel("<script>alert(1)</script>", play(two_sites(2, 1)), ("<b>", "&"))]))
    assert "<script>alert(1)</script>" in texts(tree)
    assert not list(tree.iter(f"{SVG}script"))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(64, 1024), (8, 1024), (2, 4096)])
def test_a_huge_step_is_cut_to_a_window_and_the_picture_says_so(num_ranks, num_microbatches):
    panel = Panel("predicted", play(two_sites(num_ranks, num_microbatches)))
    figure = draw_gantt([panel, dataclasses.replace(panel, title="measured")])
    tree = parsed(figure)
    assert (
        200 < len(boxes(tree, ACTION)) <= 2 * (MAX_BOXES + num_ranks)
    )  # and what is already running when the window begins
    assert len(figure.svg()) < 1_200_000
    assert any(text.startswith("Drawn: ") and "strip below" in text for text in texts(tree))
    assert "Whole step: share of the ranks that compute" in texts(tree)


def test_a_huge_number_of_ranks_is_thinned_and_the_picture_says_so():
    tree = parsed(draw_gantt([Panel("predicted", play(two_sites(200, 1)))]))
    assert len([text for text in texts(tree) if re.fullmatch(r"rank \d+", text)]) == 64
    assert "Drawn: 64 of 200 ranks, evenly spaced." in texts(tree)
    assert "Not drawn: 396 more links inside sites that carried messages." in texts(tree)


def test_a_small_step_is_drawn_whole():
    tree = parsed(draw_gantt([Panel("predicted", play(two_sites(1, 1)))]))
    assert [title.split(" · ")[0] for title, _ in boxes(tree, ACTION)] == ["0F0", "0B0"]
    assert not [text for text in texts(tree) if "Drawn" in text or "Not drawn" in text]


def test_a_window_shows_what_touches_it_and_cuts_it_off_at_its_borders():
    panel = Panel("predicted", play(two_sites(1, 3)))
    tree = parsed(draw_gantt([panel], window=(1.5, 4.0)))
    scale = choose_frame([panel], (1.5, 4.0), "").scale
    for _, rect in boxes(tree, ACTION):
        left, width = float(rect.get("x")), float(rect.get("width"))
        assert scale.start <= left <= left + width <= scale.end + 0.5
    assert [title.split(" · ")[0] for title, _ in boxes(tree, ACTION)] == ["0B0", "0F1", "0B1"]
    assert any("Drawn: 1.50 s to 4.00 s of 7.50 s" in text for text in texts(tree))


def test_a_timeline_in_which_nothing_happened_can_be_drawn():
    empty = dataclasses.replace(play(two_sites(1, 1)), actions=np.empty(0, play(two_sites(1, 1)).actions.dtype))
    assert "rank 0" in texts(parsed(draw_gantt([Panel("predicted", empty)])))


def test_messages_that_share_a_link_at_the_same_time_lie_beside_each_other():
    timeline = play(two_sites(2, 2))
    messages = timeline.messages.copy()
    messages["end_s"] += 5.0
    shared = dataclasses.replace(timeline, messages=messages.astype(MESSAGE_DTYPE))
    rows = boxes(parsed(draw_gantt([Panel("measured", as_measured(shared))])), "forward of")
    assert len({rect.get("y") for _, rect in rows}) == 2


def test_small_multiples_have_one_axis_and_no_links():
    problem = two_sites(4, 8)
    panels = [Panel(name, play(problem, name), text="a < b") for name in ("gpipe", "1f1b", "eager")]
    tree = parsed(draw_small_multiples(panels))
    assert len(boxes(tree, ACTION)) == 3 * len(panels[0].timeline.actions)
    assert not boxes(tree, "forward of")
    assert [text for text in texts(tree) if text in ("gpipegpipe", "1f1b1f1b", "eagereager")]
    assert parsed(draw_small_multiples(panels)).get("height") < parsed(draw_gantt(panels)).get("height")


def test_low_rows_have_their_rank_and_site_and_of_many_rows_some_have():
    few = [Panel("1f1b", play(two_sites(4, 8), "1f1b"), ("west", "west", "east", "east"))]
    names = [f"{site} {rank}" for rank, site in enumerate(few[0].sites)]
    assert [text for text in texts(parsed(draw_small_multiples(few))) if text[:4] in ("west", "east")] == [
        name * 2 for name in names
    ]
    many = texts(parsed(draw_small_multiples([Panel("1f1b", play(two_sites(16, 16), "1f1b"))])))
    named = [text for text in many if text.startswith("rank ")]
    assert named[0] == "rank 0rank 0"
    assert 4 <= len(named) < 16


@pytest.mark.slow
@SOME
@given(problems_with_schedules())
def test_any_step_becomes_a_picture_within_its_borders(step):
    figure = draw_gantt([Panel("predicted", simulate(*step)), Panel("measured", simulate(*step))])
    tree = parsed(figure)
    assert len(boxes(tree, ACTION)) == 2 * step[1].num_actions
    for rect in tree.iter(f"{SVG}rect"):
        assert 0 <= float(rect.get("x", 0)) + float(rect.get("width")) <= figure.width + 0.5
    assert "NaN" not in figure.svg()
    assert "nan" not in figure.svg()
