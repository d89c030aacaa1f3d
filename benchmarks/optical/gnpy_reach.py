"""Make src/farpipe/core/catalog/modes.toml: the reach of transceiver modes, computed by gnpy.

    python -m benchmarks.optical.gnpy_reach > src/farpipe/core/catalog/modes.toml

gnpy needs pandas below 3, so run it in a virtual environment of its own: pip install gnpy. The modes are those of the
transceiver "Voyager" in gnpy's example library. A line is two ROADMs with spans of 80 km of standard fibre
between them, amplifiers chosen by gnpy's design, and all channels lit. A mode reaches as many spans as leave every
channel a GSNR in 0.1 nm of the mode's required OSNR and 2 dB. Prints TOML.
"""

import datetime
import itertools
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from gnpy.core.equipment import trx_mode_params
from gnpy.core.utils import automatic_nch, dbm2watt
from gnpy.tools.json_io import load_equipment, network_from_json
from gnpy.tools.worker_utils import designed_network
from gnpy.topology.request import PathRequest, propagate

LIBRARY, KIND = "eqpt_config.json", "Voyager"
MODES = (("mode 1", 50.0), ("mode 1", 37.5), ("mode 4", 75.0), ("mode 3", 62.5), ("mode 2", 75.0))
"""Modes of the transceiver, and widths of a channel in GHz: the least in the library, and for 100G the usual 50 GHz."""
SPAN_KM, LOSS_DB_PER_KM, MARGIN_DB, MAX_SPANS = 80, 0.2, 2, 128

HEAD = """\
# Reach of transceiver modes, made by: python -m benchmarks.optical.gnpy_reach > src/farpipe/core/catalog/modes.toml
# gnpy's example library, transceiver {kind}; two ROADMs with spans of {span} km of standard fibre between them
# ({loss} dB/km, connectors without loss), amplifiers by gnpy's design, all channels lit with {power:g} dBm each; reach:
# the most spans that leave every channel the mode's required OSNR and {margin} dB.
"""


def line(spans: int) -> dict[str, Any]:
    """gnpy's topology of a line: transceiver, ROADM, spans, ROADM, transceiver."""
    chain = [("from", "Transceiver"), ("roadm from", "Roadm")]
    chain += [(f"span {index}", "Fiber") for index in range(spans)] + [("roadm to", "Roadm"), ("to", "Transceiver")]
    fibre = {"length": SPAN_KM, "length_units": "km", "loss_coef": LOSS_DB_PER_KM, "con_in": 0.0, "con_out": 0.0}
    details = {"Fiber": {"type_variety": "SSMF", "params": fibre}}
    return {
        "elements": [{"uid": uid, "type": kind, **details.get(kind, {})} for uid, kind in chain],
        "connections": [{"from_node": a, "to_node": b} for (a, _), (b, _) in itertools.pairwise(chain)],
    }


def library() -> Any:
    equipment = load_equipment(files("gnpy") / "example-data" / LIBRARY)
    equipment["SI"]["default"].sys_margins = MARGIN_DB
    return equipment


def margin_db(mode: str, width_ghz: float, spans: int) -> float:
    """The least margin of a channel after so many spans."""
    equipment = library()
    network, _, _ = designed_network(equipment, network_from_json(line(spans), equipment), "from", "to")
    path = [next(node for node in network.nodes() if node.uid == "from")]
    while path[-1].uid != "to":
        path.append(next(iter(network.successors(path[-1]))))
    propagate(path, PathRequest(**request(equipment, mode, width_ghz)), equipment)
    return float(min(path[-1].remaining_margin))


def request(equipment: Any, mode: str, width_ghz: float) -> dict[str, Any]:
    """gnpy's request for `mode`, with every channel of the band lit."""
    found = trx_mode_params(equipment, KIND, mode, error_message=True) | {"spacing": 1e9 * width_ghz}
    power = dbm2watt(equipment["SI"]["default"].power_dbm)
    found |= {"request_id": "reach", "trx_type": KIND, "trx_mode": mode, "format": mode, "source": "from"}
    found |= {"destination": "to", "bidir": False, "nodes_list": ["to"], "loose_list": ["STRICT"], "path_bandwidth": 0}
    found |= {"nb_channel": automatic_nch(found["f_min"], found["f_max"], found["spacing"]), "power": power}
    return found | {"effective_freq_slot": None, "tx_power": power}


def most(fits: Callable[[int], bool]) -> int:
    """The largest number up to MAX_SPANS that fits, given that all smaller ones do."""
    low, high = 0, MAX_SPANS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def main() -> None:
    usual = library()
    power = usual["SI"]["default"].power_dbm
    print(HEAD.format(kind=KIND, span=SPAN_KM, loss=LOSS_DB_PER_KM, power=power, margin=MARGIN_DB))
    date = datetime.datetime.now(datetime.UTC).date()
    for mode, width in MODES:
        rate = trx_mode_params(usual, KIND, mode, error_message=True)["bit_rate"] / 1e9
        spans = most(lambda count, mode=mode, width=width: margin_db(mode, width, count) >= 0)
        print(f'["voyager-{rate:g}g-{width:g}ghz"]\nrate_gbit_s = {rate:g}\nwidth_ghz = {width:g}')
        print(f'reach_km = {SPAN_KM * spans}\nsource = "Computed by gnpy {version("gnpy")}: {KIND}, {mode}"')
        print(f"date = {date}\n")


if __name__ == "__main__":
    main()
