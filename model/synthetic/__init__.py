"""Checkpoints of any size with random weights that behave like a sparse model's."""
