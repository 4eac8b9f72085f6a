"""Scores of generated images: features, their statistics, metrics, and evaluators."""

from evaluation.adm import AdmEvaluator, AdmSuite
from evaluation.detectors import DigitJudge, GlyphJudge, PixelDetector
from evaluation.evaluators import DenseLoss, DigitsEvaluator, GlyphsEvaluator, SampleGrid
from evaluation.inception import InceptionDetector
from evaluation.metrics import frechet_distance, inception_score, kernel_distance, precision_recall
from evaluation.reference import make_reference, open_reference
from evaluation.statistics import FeatureStatistics

__all__ = [
    "AdmEvaluator",
    "AdmSuite",
    "DenseLoss",
    "DigitJudge",
    "DigitsEvaluator",
    "FeatureStatistics",
    "GlyphJudge",
    "GlyphsEvaluator",
    "InceptionDetector",
    "PixelDetector",
    "SampleGrid",
    "frechet_distance",
    "inception_score",
    "kernel_distance",
    "make_reference",
    "open_reference",
    "precision_recall",
]
