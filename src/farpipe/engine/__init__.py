"""The engine: ranks that execute any schedule with PyTorch over a real network, and survive it."""
