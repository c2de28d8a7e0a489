"""Grids of runs, executed locally or on a Ray cluster."""
