"""Deaths of the service while real trainings run; `benchmarks/fleet/service_kills.py` does fifty of them."""

import pytest

from benchmarks.fleet.service_kills import trial

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("is_pair", [False, True], ids=["killed", "pair"])
def test_deaths_of_the_service_lose_nothing_and_start_nothing_twice(database, tmp_path, is_pair):
    rounds = 2 if is_pair else 6
    assert trial(tmp_path / "fleet", rounds, 2, database, is_pair) == ([], {})
