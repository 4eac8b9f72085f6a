"""Scores of generated images: detectors, metrics, references, suites and evaluators."""

from evaluation.adm import AdmSuite
from evaluation.detectors.digits import DigitClassifier, PixelDetector
from evaluation.detectors.glyphs import GlyphClassifier
from evaluation.detectors.inception import InceptionDetector
from evaluation.detectors.scenes import SceneReader
from evaluation.evaluators import DenseLoss, ExcessLoss, SampleGrid, ScoreSamples
from evaluation.features import ArrayImages
from evaluation.metrics.authenticity import Authenticity
from evaluation.metrics.clip_score import ClipScore
from evaluation.metrics.cmmd import Cmmd
from evaluation.metrics.density_coverage import DensityCoverage
from evaluation.metrics.frechet import FrechetDistance, frechet_distance
from evaluation.metrics.frechet_infinite import InfiniteFrechetDistance
from evaluation.metrics.frechet_ratio import FrechetRatio
from evaluation.metrics.inception_score import InceptionScore
from evaluation.metrics.kernel import KernelDistance
from evaluation.metrics.label_accuracy import LabelAccuracy
from evaluation.metrics.memorised import Memorised
from evaluation.metrics.precision_recall import PrecisionRecall
from evaluation.metrics.scene_accuracy import SceneAccuracy
from evaluation.metrics.vendi import VendiScore
from evaluation.reference import Reference, make_reference, open_reference
from evaluation.statistics import FeatureStatistics
from evaluation.suite import Suite
