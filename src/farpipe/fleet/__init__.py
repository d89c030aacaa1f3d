"""Many jobs over many regions: a pure core, policies, a simulator."""
