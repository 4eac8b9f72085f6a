"""The training loop and its parts: the run's folder, checkpoints, the average of the weights, trackers."""
