"""Many jobs over many regions: a pure core, policies, a simulator.

`play` a trace of `read_jobs` in a scenario of `load_scenario` under a policy's name, or a policy of your own.
"""

from farpipe.fleet.play import play
from farpipe.fleet.policies import policy_of
from farpipe.fleet.policies.protocol import Decision, Policy, View
from farpipe.fleet.scenario import load_scenario
from farpipe.fleet.traces import read_jobs

__all__ = ["Decision", "Policy", "View", "load_scenario", "play", "policy_of", "read_jobs"]
