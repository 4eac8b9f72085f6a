"""Detectors, one file each: detector(images (N, H, W, C) uint8) -> {name: features (N, ...)}.

One with `fit(images, labels)` learns from the images of the reference first, on the first rank; `record`, if
any, describes it; one that runs on several ranks gives `num_features` by name.
"""
