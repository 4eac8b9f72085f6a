"""Averages of the weights, one file for each kind."""

from training.ema.average import EMA
from training.ema.post_hoc import PostHocEMA, networks_of, reconstruct
