"""Detectors, one file each: detector(images (N, H, W, C) uint8) -> {name: features (N, ...)}.

One that has `fit(images, labels)` learns from the images of the reference first; `record`, where there is
one, says what it is; one that looks at images on several processes tells `num_features` by name.
"""
