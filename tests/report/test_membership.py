"""What a report says of sites that train together though each is a run of its own."""

from farpipe.report.membership import draw_membership, outer_message_view

LINES = [
    {
        "step": step,
        "sites": ["lugano", "zurich"] if step != 2 else ["zurich"],
        "outer_messages": [{"what": "fragment 0", "from": ["lugano"], "bytes": 2_000_000, "slack_s": slack_s}],
    }
    for step, slack_s in enumerate((0.5, 0.25, -0.125))
]


def test_messages_of_other_sites_have_their_median_and_least_slack():
    table = outer_message_view(LINES)
    assert table.rows == (("fragment 0", "lugano", "3", "1.91 MiB", "250 ms", "-125 ms"),)
    assert "needed" in table.note


def test_runs_of_one_world_have_neither():
    assert outer_message_view([{"step": 0}]) is None
    assert draw_membership([{"step": 0}], "x") is None


def test_the_band_counts_the_steps_that_fewer_sites_have_done():
    assert "3 steps, 1 of them by fewer sites" in draw_membership(LINES, "x").description
