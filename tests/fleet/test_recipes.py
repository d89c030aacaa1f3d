"""The fleets that farpipe ships, each with its trace."""

from pathlib import Path

import pytest

from farpipe.fleet.scenario import load_scenario
from farpipe.fleet.traces import read_jobs

FOLDER = Path(__file__).parents[2] / "recipes" / "fleet"
TRACES = {"six_regions": "jobs", "three_clusters": "three_clusters_jobs", "bace_pipe": "bace_pipe_jobs"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_fleet_loads_and_could_hold_each_of_its_jobs(path):
    scenario = load_scenario(path)
    jobs = read_jobs(FOLDER / f"{TRACES[path.stem]}.csv", scenario.start)
    assert max(job.min_devices for job in jobs) <= sum(site.num_devices for site in scenario.cluster.sites)


def test_the_setting_of_bace_s_paper_is_as_its_summaries_have_it():
    cluster = load_scenario(FOLDER / "bace_pipe.toml").cluster
    assert sorted(site.num_devices for site in cluster.sites) == [16, 32, 48, 64, 96, 128]
    prices = [site.prices.electricity_usd_per_mwh for site in cluster.sites]
    assert (min(prices), max(prices)) == (156.0, 295.0)
    assert all(25e9 <= 8 * link.bandwidth_bytes_per_s <= 100e9 for link in cluster.links)
