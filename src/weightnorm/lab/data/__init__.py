"""Data sets as tensors: found or downloaded, verified, then parsed."""
