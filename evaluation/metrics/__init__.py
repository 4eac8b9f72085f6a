"""Metrics, one file each: metric(reference, samples) -> {key: value}."""
