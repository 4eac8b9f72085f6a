"""The training loop and what surrounds it: the folder of a run, checkpoints, weight averages, trackers."""
