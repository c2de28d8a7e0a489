"""Grids of runs, executed on this machine or on a Ray cluster."""
