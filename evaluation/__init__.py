"""Scores of generated images: features, their statistics, metrics, and evaluators."""

from evaluation.adm import AdmEvaluator, AdmSuite
from evaluation.detectors.digits import DigitJudge, PixelDetector
from evaluation.detectors.glyphs import GlyphJudge
from evaluation.detectors.inception import InceptionDetector
from evaluation.evaluators import DenseLoss, DigitsEvaluator, GlyphsEvaluator, SampleGrid
from evaluation.metrics.frechet import frechet_distance
from evaluation.metrics.inception_score import inception_score
from evaluation.metrics.kernel import kernel_distance
from evaluation.metrics.precision_recall import precision_recall
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
