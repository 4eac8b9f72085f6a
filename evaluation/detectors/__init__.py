"""Detectors, one file each: what is seen in images (N, H, W, C) uint8."""
