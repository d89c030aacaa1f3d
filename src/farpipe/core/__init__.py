"""One optimizer step as numbers: jobs, the catalog, Problems, Schedules, and the simulator that plays them."""
