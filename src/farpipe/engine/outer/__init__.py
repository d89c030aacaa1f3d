"""Sites that leave and return: each is a run of its own, and outer worlds join them. See `docs/decisions/worlds.md`."""
