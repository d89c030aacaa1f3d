"""The chunk map: every slice is drawn once in the colour of its chunk; beside it what stages took and held."""

import dataclasses
import re

import numpy as np

from farpipe.planning.workload.cut import Cut, cut_batch
from farpipe.report.chunk_map import MAX_ROWS, colour_of, draw_chunk_map, stage_table
from farpipe.report.page import render
from farpipe.report.views import RunReport
from planning.workload.test_cut import LAW
from report.steps import run_view

LENGTHS = [4000, 2500, 900, 300, 40, 30, 20, 7, 1]


def boxes(svg):
    """(chunk, sequence, first token, last token, left, width, colour) of every box."""
    pattern = (
        r'<rect x="([\d.]+)" y="0" width="([\d.]+)" height="11" fill="([^"]+)"><title>chunk (\d+): sequence (\d+), '
        r"tokens (\d+) to (\d+) of"
    )
    return [
        (*map(int, (chunk, sequence, start, end)), float(left), float(width), fill)
        for left, width, fill, chunk, sequence, start, end in re.findall(pattern, svg)
    ]


def chunks_of(lengths):
    target_s = LAW.pair_s * max(lengths) ** 2 / 8 + LAW.token_s * max(lengths) / 4
    return cut_batch(lengths, Cut(target_s, 10**6), LAW).chunks()


def test_every_slice_is_drawn_once_in_the_colour_of_its_chunk():
    chunks = chunks_of(LENGTHS)
    assert {chunk.kind for chunk in chunks} >= {"split", "hybrid"}
    found = boxes(draw_chunk_map(chunks, "map").svg())
    expected = [(index, part.sequence, part.start, part.end) for index, c in enumerate(chunks) for part in c.slices]
    assert sorted(box[:4] for box in found) == sorted(expected)
    assert all(colour == colour_of(chunk) for chunk, *_, colour in found)
    assert len({colour_of(chunk) for chunk in range(30)}) == 30
    longest = max(found, key=lambda box: box[5])
    assert longest[4] + longest[5] <= 1080


def test_short_sequences_share_lines_and_those_without_a_place_are_counted():
    chunks = chunks_of([1000, *[300] * 200])
    figure = draw_chunk_map(chunks, "map")
    found = boxes(figure.svg())
    assert len(found) < 204
    left_out = int(re.search(r"(\d+) of the shortest are left out", figure.description)[1])
    assert len(found) + left_out == sum(len(chunk.slices) for chunk in chunks)
    assert figure.svg().count("sequence 0,") >= 1
    assert figure.svg().count(">sequence ") == MAX_ROWS


def test_the_page_shows_the_map_and_what_stages_took_and_held():
    view = dataclasses.replace(
        run_view(num_steps=4),
        chunks=chunks_of(LENGTHS),
        predicted_held_bytes=(2048, 1024),
        measured_held_bytes=(2000, 900),
    )
    page = render(RunReport("a run", (view,)))
    assert "<h2>Chunks</h2>" in page
    assert "Chunk map" in page
    table = stage_table(view)
    assert table.columns == (
        *("stage", "predicted F", "predicted B", "measured F", "measured B", "error"),
        *("predicted held", "measured held"),
    )
    assert [row[6:] for row in table.rows] == [("2 KiB", "1.95 KiB"), ("1 KiB", "900 B")]
    plain = render(RunReport("a run", (run_view(num_steps=4),)))
    assert "Chunk map" not in plain


def test_a_step_that_was_not_measured_has_only_its_prediction():
    table = stage_table(dataclasses.replace(run_view(), chunks=chunks_of(LENGTHS)))
    assert table.columns == ("stage", "predicted F", "predicted B")


def test_recomputed_layers_are_marked_and_their_kind_is_named():
    chunks = chunks_of(LENGTHS)
    layers = np.full((2, len(chunks)), 3)
    for keeps, what in (
        (False, "recompute of its chunk, 6 where"),
        (True, "its chunk, but for their attention, 6 where"),
    ):
        figure = draw_chunk_map(chunks, "map", layers, keeps_attention=keeps)
        assert what in figure.description
        assert figure.svg().count(", 6 layers recomputed") >= len(chunks)
    assert "recompute" not in draw_chunk_map(chunks, "map").description
