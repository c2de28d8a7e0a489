"""Cost of weight normalization in time and memory, measured beside alternatives."""
