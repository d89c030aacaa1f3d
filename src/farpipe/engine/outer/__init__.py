"""Sites that train together though each is a run of its own: they leave and return, and outer worlds join them."""
