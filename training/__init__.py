"""The training loop and what surrounds it: configuration, checkpoints, weight averages, trackers, provenance."""
