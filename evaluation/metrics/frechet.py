"""The Frechet distance between two Gaussians (FID, sFID). [ADM]"""

import numpy as np
import torch

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.statistics import FeatureStatistics

Array = np.ndarray | torch.Tensor


class FrechetDistance(Metric):
    """The Frechet distance between Gaussians with the mean and covariance of the features.

    Args:
        key: name of the score.
        features: name of the detector's features.
        held_out: compare with the reference's held-out images.
    """

    def __init__(self, key: str, features: str, held_out: bool = False):
        self.keys, self.features, self.held_out = (key,), features, held_out
        self.needs = ((FeatureStatistics, features),)

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        ours, theirs = (stats[FeatureStatistics, self.features] for stats in (samples, reference))
        distance = frechet_distance(ours.mean, ours.covariance, theirs.mean, theirs.covariance)
        return {self.keys[0]: distance}


def frechet_distance(mu1: Array, sigma1: Array, mu2: Array, sigma2: Array) -> float:
    """Return the squared Frechet distance between two Gaussians.

    DEVIATION: the original takes a matrix square root, which fails or turns complex where a covariance is
    singular. Here sigma1 = F F^T by a pivoted Cholesky decomposition, which stops at the rank, and
    (sigma1 sigma2)^(1/2) has the trace of (F^T sigma2 F)^(1/2), which is symmetric.

    Args:
        mu1, mu2: means (F,).
        sigma1, sigma2: covariances (F, F).

    Raises:
        ValueError: the shapes differ, or a value is not finite.
    """
    from scipy.linalg import eigvalsh

    mu1, sigma1, mu2, sigma2 = (torch.as_tensor(a).double().cpu().numpy() for a in (mu1, sigma1, mu2, sigma2))
    if mu1.shape != mu2.shape or sigma1.shape != sigma2.shape or sigma1.shape != (*mu1.shape, *mu1.shape):
        shapes = f"{mu1.shape}, {sigma1.shape} and {mu2.shape}, {sigma2.shape}"
        raise ValueError(f"means and covariances {shapes} cannot be compared")
    if not all(np.isfinite(a).all() for a in (mu1, sigma1, mu2, sigma2)):
        raise ValueError("means and covariances must be finite")
    factor = _factor(sigma1)  # (F, rank)
    squares = eigvalsh(factor.T @ sigma2 @ factor, check_finite=False) if factor.size else np.zeros(1)
    trace_of_root = np.sqrt(squares.clip(min=0)).sum()
    # d^2 = |mu1 - mu2|^2 + tr(sigma1 + sigma2 - 2 (sigma1 sigma2)^(1/2)), negative only by rounding
    distance = np.square(mu1 - mu2).sum() + np.trace(sigma1) + np.trace(sigma2) - 2 * trace_of_root
    return max(0.0, float(distance))


def _factor(sigma: np.ndarray) -> np.ndarray:
    """Return F (n, rank) with F F^T = sigma, for a covariance sigma (n, n) of any rank."""
    from scipy.linalg import lapack

    lower, pivots, rank, _ = lapack.dpstrf(sigma, lower=1)
    factor = np.empty((len(sigma), rank))
    factor[pivots - 1] = np.tril(lower)[:, :rank]
    return factor
