"""The orders of published tables are frozen. `python tests/core/schedule/test_frozen_orders.py` rewrites the data."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest

from benchmarks.cost_model.measured_schedules import IN_V, NUM_RANKS
from benchmarks.orders import crosspipe_grid
from core.schedule.test_library_zero_bubble import PUBLISHED, published_problem
from farpipe.core.errors import FarpipeError
from farpipe.core.schedule.library import order
from pipelines import pipeline

FROZEN = Path(__file__).with_suffix(".json")
SHAPES = crosspipe_grid.TRADITIONAL | {"wave": "v"}


def digest(name, problem):
    """Of the order's actions as text."""
    try:
        text = json.dumps(order(name, problem).to_body()["ranks"])
    except FarpipeError:
        return "none"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def zero_bubble(name):
    """Tables 5 and 9 of arXiv 2401.10241."""
    return [digest(name, published_problem(*row[:5])) for row in PUBLISHED]


def crosspipe(name, in_flight):
    """Table 5 of arXiv 2507.00217: every latency and message time."""
    delays = itertools.product(crosspipe_grid.DELAYS, repeat=2)
    return [digest(name, crosspipe_grid.two_sites(SHAPES[name], delay, in_flight)) for delay in delays]


def measured(name):
    """Primus' schedules on eight devices."""
    return [digest(name, pipeline(NUM_RANKS, 32, 2 if name == "interleaved" else 1, v_shape=name in IN_V))]


CASES = {f"zero bubble, {name}": (zero_bubble, name) for name in ("1f1b", "zb-1p", "zb-2p")}
CASES |= {
    f"crosspipe, {name}, {in_flight} in flight": (crosspipe, name, in_flight)
    for name in SHAPES
    for in_flight in (crosspipe_grid.EQUAL, crosspipe_grid.TWICE)
}
CASES |= {f"measured, {name}": (measured, name) for name in ("1f1b", "interleaved", "zb-h1", *IN_V)}


def digests(case):
    """Of every setting of a table; one where all are the same."""
    made, *arguments = CASES[case]
    found = made(*arguments)
    return " ".join(found if len(set(found)) > 1 else found[:1])


@pytest.mark.parametrize("case", CASES)
def test_an_order_of_a_published_table_is_what_it_was(case):
    assert digests(case) == json.loads(FROZEN.read_text())[case]


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({case: digests(case) for case in CASES}, indent=0) + "\n")
