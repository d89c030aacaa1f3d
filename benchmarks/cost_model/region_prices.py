"""Make src/farpipe/core/catalog/prices.toml from tables of prices.

    FARPIPE_DATA=folder python -m benchmarks.cost_model.region_prices

The folder has prices/ (hourly electricity and carbon of HewlettPackard/green-dcc, rows of skypilot-catalog) and wan/
(egress prices of Skyplane's profiles). Prints the file; redirect it to where it belongs.
"""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shared.data import data_folder

ZONES = {
    "gcp:us-central1": None,
    "gcp:us-east4": "US-MIDA-PJM",
    "gcp:us-west4": None,
    "gcp:europe-west1": "BE",
    "gcp:europe-west3": "DE-LU",
    "gcp:europe-west4": "NL",
    "gcp:europe-west9": "FR",
    "gcp:asia-northeast1": "JP-TK",
    "gcp:asia-northeast3": "KR",
    "gcp:asia-south1": "IN-WE",
    "gcp:asia-southeast1": "SG",
    "gcp:australia-southeast1": "AU-NSW",
    "aws:us-east-1": "US-MIDA-PJM",
    "aws:us-west-1": "US-CAL-CISO",
    "aws:us-west-2": None,
    "aws:eu-west-1": None,
    "aws:eu-west-3": "FR",
    "aws:eu-central-1": "DE-LU",
    "aws:ap-northeast-1": "JP-TK",
    "aws:ap-northeast-2": "KR",
    "aws:ap-southeast-1": "SG",
    "aws:ap-southeast-2": "AU-NSW",
    "aws:sa-east-1": "BR-SP",
}
"""Regions and the electricity market that they are in, None where the tables lack it."""
DEVICES = {"A100-80GB": "a100-80gb", "H100": "h100-sxm", "H200": "h200", "B200": "b200"}
PUES = {"gcp": ("1.10", "PUE: Google, 2023"), "aws": ("1.15", "PUE: Amazon, 2023")}
HEAD = """\
# Prices of regions, for `region` of a site. A key that is missing is not known here: give it in `prices` of the site.
# `electricity` (USD/MWh, wholesale) and `carbon` (g/kWh, direct) are means over the hours of January to June 2024 in
# the market `zone`; what a provider really pays is not public. `rent` is per device and hour, interruptible (spot): an
# eighth of a machine of eight. `egress` is per GB to another region of the same provider, the median. `pue` is the
# provider's mean over all its sites. Made by benchmarks/cost_model/region_prices.py.
"""


def main() -> None:
    """Print the whole file."""
    folder = data_folder("prices/ and wan/")
    power = means(folder / "prices" / "electricity_usd_per_mwh_2024_h1.csv")
    carbon = means(folder / "prices" / "carbon_direct_g_per_kwh_2024_h1.csv")
    rents, egress = spot_rents(folder), egress_prices(folder)
    print(HEAD)
    for region, zone in ZONES.items():
        print("\n".join(row(region, zone, power, carbon, rents.get(region, {}), egress.get(region))), end="\n\n")


def row(
    region: str,
    zone: str | None,
    power: dict[str, float],
    carbon: dict[str, float],
    rents: dict[str, float],
    egress: float | None,
) -> Iterator[str]:
    """The lines of one region."""
    pue, origin = PUES[region[:3]]
    sources = [origin]
    yield f'["{region}"]'
    if zone:
        yield f'zone = "{zone}"\nelectricity = {power[zone]:.1f}'
        sources.append("electricity and carbon: HewlettPackard/green-dcc (MIT)")
    if zone in carbon:
        yield f"carbon = {carbon[zone]:.0f}"
    yield f"pue = {pue}"
    if rents:
        yield "rent = { " + ", ".join(f"{name} = {rents[name]}" for name in sorted(rents)) + " }"
        sources.append("rent: skypilot-catalog (Apache-2.0)")
    if egress is not None:
        yield f"egress = {egress}"
        sources.append("egress: Skyplane's profiles of February 2023 (Apache-2.0)")
    yield f'source = "{"; ".join(sources)}"\ndate = 2024-06-30'


def means(path: Path) -> dict[str, float]:
    """The mean of every column but the first."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {name: statistics.fmean(float(row[name]) for row in rows) for name in list(rows[0])[1:]}


def spot_rents(folder: Path) -> dict[str, dict[str, float]]:
    """USD per device and hour, by region and device; the on-demand column mixes unlike offers and is left out."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    with (folder / "prices" / "gcp_gpu_rows_excerpt.csv").open() as file:
        for row in csv.DictReader(file):
            price = float(row["SpotPrice"]) / float(row["AcceleratorCount"])
            found[f"gcp:{row['Region']}"][DEVICES[row["AcceleratorName"]]] = round(price, 2)
    return found


def egress_prices(folder: Path) -> dict[str, float]:
    """USD per GB from a region to others of its provider, the median."""
    found: dict[str, list[float]] = defaultdict(list)
    with (folder / "wan" / "egress_usd_per_gb_2023-02.csv").open() as file:
        for row in csv.DictReader(file):
            source, target = row["src_region"], row["dst_region"]
            if source != target and source.split(":")[0] == target.split(":")[0]:
                found[source].append(float(row["usd_per_gb"]))
    return {region: statistics.median(prices) for region, prices in found.items()}


if __name__ == "__main__":
    main()
