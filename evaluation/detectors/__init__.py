"""Detectors, one per file: detector(images (N, H, W, C) uint8) -> {name: features (N, ...)}.

A detector with `fit(images, labels)` is fitted on the images of the reference, on the first rank. An optional
`record` describes the detector. A detector that runs on several ranks declares `num_features` by name.
"""
