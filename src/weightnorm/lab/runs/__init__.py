"""What every experiment shares: configuration, checkpoints, records, progress, ranks."""
