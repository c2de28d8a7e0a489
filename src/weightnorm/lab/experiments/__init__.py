"""Experiments: one file each, read top to bottom; what is not the algorithm is shared."""
