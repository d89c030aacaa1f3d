"""Batches of tokens as tensors."""
