"""Sites that train together though each is a run of its own."""
