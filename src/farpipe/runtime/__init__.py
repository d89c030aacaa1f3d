"""The engine: executes a schedule with PyTorch over the transport; the only package that imports torch."""
