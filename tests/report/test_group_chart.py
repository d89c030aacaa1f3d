"""The picture of groups of devices: every chunk's forward and backward on the rows of its devices, at its time."""

import re

import numpy as np

from farpipe.planning.workload import Chunk, Slice
from farpipe.report.group_chart import GroupRun, draw_groups
from report.steps import run_view


def test_boxes_lie_on_the_devices_of_their_group_at_its_time():
    view = run_view()
    count, end_s = view.problem.num_microbatches, view.predicted.makespan_s
    chunks = [Chunk((Slice(number, 0, 100, 100),)) for number in range(count)]
    runs = [GroupRun(0, 4, 0.0, chunks, view.predicted), GroupRun(2, 1, end_s, chunks, view.predicted)]
    svg = draw_groups(runs, 4, 2 * end_s).svg()
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"[^>]*><title>(\w+) of', svg)
    assert len(found) == 2 * len(view.predicted.actions)
    left, top, _, height = np.array([list(map(float, one[:4])) for one in found]).T
    wide = height > 2 * height.min()
    assert set(top[wide]) == {0.5}
    assert set(top[~wide]) == {2 * 15 + 0.5}
    assert left[wide].min() < left[~wide].min()
    assert left[~wide].min() >= (left + 0).min() + (1080 - 24 - 84) / 2 - 1
    assert {one[4] for one in found} == {"forward", "backward"}
    assert "1 group of 4 devices, 1 group of 1 device" in svg


def test_hints_name_the_sequences():
    view = run_view()
    count = view.problem.num_microbatches
    chunks = [Chunk((Slice(2 * number, 0, 30, 30), Slice(2 * number + 1, 0, 12, 12))) for number in range(count)]
    svg = draw_groups([GroupRun(0, 1, 0.0, chunks, view.predicted)], 1, view.predicted.makespan_s).svg()
    assert "of 42 tokens" in svg
    assert ": sequences 0, 1<" in svg
