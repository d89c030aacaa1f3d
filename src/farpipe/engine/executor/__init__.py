"""One rank's part of a step: its actions in order, and the tensors it exchanges with other ranks."""
