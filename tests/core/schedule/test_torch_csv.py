import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.core.errors import InputError, ScheduleError
from farpipe.core.schedule.library import order
from farpipe.core.schedule.torch_csv import from_torch_csv, to_torch_csv
from farpipe.core.step import Schedule
from pipelines import two_sites

TEXT = "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n"


def test_a_file_has_a_row_per_rank_and_a_cell_per_action():
    schedule = Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1I0 1W0 1F1 1B1"], 2)
    assert to_torch_csv(schedule) == TEXT
    assert from_torch_csv(TEXT).ranks == schedule.ranks


def test_what_torch_writes_is_read():
    text = '0F0,,0F1,0B0,0B1\r\n,1F0,1B0,"1F1", 1B1\r\n\r\n'
    schedule = from_torch_csv(text, method="theirs")
    assert [list(map(str, order)) for order in schedule.ranks] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]
    assert (schedule.num_microbatches, schedule.method) == (2, "theirs")


@pytest.mark.parametrize("method", ["1f1b", "gpipe", "eager", "zb-h2", "zb-1p"])
def test_orders_of_the_library_survive_the_round_trip(method):
    schedule = order(method, two_sites(4, 9, latency=2))
    assert from_torch_csv(to_torch_csv(schedule)).ranks == schedule.ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0x,0B0\n", r"f\.csv: row 1, column 1: expected an action such as '0F0' or '3W12', found '0F0x'"),
        ("0F0,0B0\n1F0,1B00\n", r"f\.csv: row 2, column 2: expected an action"),
        ("0F0,F0\n", "row 1, column 2"),
        ("0F0,0R0\n", "row 1, column 2"),
        ("0F0,0SEND_F0,0B0\n", r"row 1, column 2: .*compute_only"),
        ("0UNSHARD,0F0,0B0\n", r"row 1, column 1: .*compute_only"),
        ("(0F0;1B0)OVERLAP_F_B\n", "row 1, column 1: .* two actions at once"),
        ("0F0,0B0\n,,\n1F0,1B0\n", r"f\.csv: row 2: this rank has nothing to do"),
        ("\n \n", "has no actions"),
        ('0F0,"0B0\n', "not CSV"),
        ("0F0,0F1,0B0\n", "0B1 .* is missing on rank 0"),
        ("0F0,0B0,0F2,0B2\n", "0F1 is missing on rank 0"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 is missing, but there is a stage 2"),
        ("0F0,0B0\n0F1,0B1\n", "0F1: stage 0 is on rank 0, not on rank 1"),
        ("0B0,0F0\n", "is not valid: 0B0 comes before its forward 0F0"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlock"),
        ("0F999999999,0B0\n", "more than 1048576"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(InputError, match=message):
        from_torch_csv(text, "f.csv")


@given(st.text(alphabet='0123FIWBR,\n"x ;()_SEND', max_size=40))
def test_any_text_is_a_schedule_or_an_error(text):
    try:
        schedule = from_torch_csv(text)
    except InputError:
        return
    assert from_torch_csv(to_torch_csv_of_any(schedule)).ranks == schedule.ranks


def to_torch_csv_of_any(schedule):
    """Without the rules of torch's runtime."""
    return "\n".join(",".join(map(str, order)) for order in schedule.ranks)


def test_an_order_that_torch_would_run_wrongly_is_refused():
    schedule = Schedule.from_text(["0F1 0F0 0B1 0B0"], 2)
    with pytest.raises(ScheduleError, match=r"wrong gradients: .* 0F1 comes at the place of 0F0\n(.|\n)*\^\^\^"):
        to_torch_csv(schedule)


def test_an_order_that_torch_would_not_load_is_refused():
    schedule = Schedule.from_text(["0F0 1F0 1B0 0B0", "2F0 2B0"], 1)
    with pytest.raises(ScheduleError, match="rank 1 has 1 and rank 0 2"):
        to_torch_csv(schedule)
    with pytest.raises(ScheduleError, match="is not valid: "):
        to_torch_csv(Schedule.from_text(["0F0"], 1))
