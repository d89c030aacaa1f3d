"""Light paths: topologies, spectrum, assignment, traffic and blocking, and the loop with the pipeline.

`blocking(network="nsfnet", load=250)` answers a question in one call; the other names are its parts.
"""

from farpipe.optical.blocking_study import BlockingResult, blocking
from farpipe.optical.light_setting import LightSetting
from farpipe.optical.modulation import find_modulation
from farpipe.optical.network_files import find_network
from farpipe.optical.paths import k_shortest, load_paths
from farpipe.optical.policies import POLICIES, find_policy
from farpipe.optical.spectrum import Grid
from farpipe.optical.traffic import PoissonTraffic, load_trace
from farpipe.optical.traffic_outcome import TrafficOutcome, play_traffic, poisson_blocking

__all__ = [
    "POLICIES",
    "BlockingResult",
    "Grid",
    "LightSetting",
    "PoissonTraffic",
    "TrafficOutcome",
    "blocking",
    "find_modulation",
    "find_network",
    "find_policy",
    "k_shortest",
    "load_paths",
    "load_trace",
    "play_traffic",
    "poisson_blocking",
]
