"""A run as files and processes: its directory, its ranks on this machine, commands for others."""
