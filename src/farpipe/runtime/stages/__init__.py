"""Stages out of any PyTorch module: weight gradients that can wait, slices of Hugging Face models, their self-check."""
