"""The networks of the paper; no data, no loop."""
