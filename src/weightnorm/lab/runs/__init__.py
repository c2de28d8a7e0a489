"""Shared by all experiments: configs, checkpoints, records, progress, ranks."""
