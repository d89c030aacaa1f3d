"""The fleet, live: launchers that run its jobs, and the loop that makes what runs equal to what the state wants."""
