"""Scores of generated images: features, their statistics, metrics, and the evaluators that put them together."""

from evaluation.detectors import DigitJudge, PixelDetector
from evaluation.evaluators import DenseLoss, DigitsEvaluator, SampleGrid
from evaluation.metrics import frechet_distance, inception_score, precision_recall
from evaluation.statistics import FeatureStatistics

__all__ = [
    "DenseLoss",
    "DigitJudge",
    "DigitsEvaluator",
    "FeatureStatistics",
    "PixelDetector",
    "SampleGrid",
    "frechet_distance",
    "inception_score",
    "precision_recall",
]
