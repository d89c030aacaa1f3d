"""What survives a run: files, when they are written, where to go on."""
