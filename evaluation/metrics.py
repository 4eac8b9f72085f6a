"""Frechet distance, inception score, precision and recall as the ADM suite defines them, and the kernel
distance. [ADM]

Everything takes numpy arrays or tensors and returns floats.
"""

import numpy as np
import torch

from evaluation.precision import strict_fp32
from evaluation.statistics import SplitScores

Array = np.ndarray | torch.Tensor


def frechet_distance(mu1: Array, sigma1: Array, mu2: Array, sigma2: Array) -> float:
    """Return the squared Frechet distance between two Gaussians.

    DEVIATION: the original takes a matrix square root, which fails or turns complex where a covariance is
        singular. Here
    sigma1 = F F^T by a Cholesky decomposition with pivots, which stops at the rank, and (sigma1 sigma2)^(1/2)
    has the trace of (F^T sigma2 F)^(1/2), which is symmetric.

    Args:
        mu1, mu2: means (F,).
        sigma1, sigma2: covariances (F, F).

    Raises:
        ValueError: shapes that differ, or values that are not finite.
    """
    from scipy.linalg import eigvalsh

    mu1, sigma1, mu2, sigma2 = (torch.as_tensor(a).double().cpu().numpy() for a in (mu1, sigma1, mu2, sigma2))
    if mu1.shape != mu2.shape or sigma1.shape != sigma2.shape or sigma1.shape != (*mu1.shape, *mu1.shape):
        raise ValueError(
            f"features of {mu1.shape}, {sigma1.shape} and {mu2.shape}, {sigma2.shape} cannot be compared"
        )
    if not all(np.isfinite(a).all() for a in (mu1, sigma1, mu2, sigma2)):
        raise ValueError("means and covariances must be finite")
    factor = _factor(sigma1)  # (F, rank)
    squares = eigvalsh(factor.T @ sigma2 @ factor, check_finite=False) if factor.size else np.zeros(1)
    trace_of_root = np.sqrt(squares.clip(min=0)).sum()
    # d^2 = |mu1 - mu2|^2 + tr(sigma1 + sigma2 - 2 (sigma1 sigma2)^(1/2))
    return float(np.square(mu1 - mu2).sum() + np.trace(sigma1) + np.trace(sigma2) - 2 * trace_of_root)


def _factor(sigma: np.ndarray) -> np.ndarray:
    """Return F (n, rank) with F F^T = sigma, for a covariance sigma (n, n) of any rank."""
    from scipy.linalg import lapack

    lower, pivots, rank, _ = lapack.dpstrf(sigma, lower=1)
    factor = np.empty((len(sigma), rank))
    factor[pivots - 1] = np.tril(lower)[:, :rank]
    return factor


def inception_score(probs: Array, split_size: int = 5000) -> float:
    """Return the mean over contiguous splits, in the given order, of exp(E KL(p(y|x) || p(y))).

    Args:
        probs: (N, classes) probabilities; a short last split counts like the others.
    """
    probs = torch.as_tensor(probs)
    return SplitScores(len(probs), probs.shape[1], split_size, probs.device).update(0, probs).score()


def kernel_distance(
    reference_features: Array,
    sample_features: Array,
    subset_size: int = 1000,
    num_subsets: int = 100,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the kernel distance (KID): mean and standard deviation over random subsets. [KID]

    Args:
        reference_features, sample_features: (N, F) and (M, F).
        subset_size: drawn from both sets without replacement; at most the smaller set.

    Raises:
        ValueError: fewer than 2 features, feature lengths that differ, or features that are not finite.
    """
    reference, samples = _comparable(reference_features, sample_features, at_least=2)
    subset_size = min(subset_size, len(reference), len(samples))
    rng = np.random.default_rng(seed)
    values = [
        _squared_discrepancy(
            *(f[rng.choice(len(f), subset_size, replace=False)].double() for f in (reference, samples))
        )
        for _ in range(num_subsets)
    ]
    return float(np.mean(values)), float(np.std(values))


def _squared_discrepancy(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the unbiased estimate of the squared maximum mean discrepancy of x and y, both (n, F)."""
    n = len(x)
    # k(a, b) = (a.b / F + 1)^3
    xx, yy, xy = ((a @ b.T / x.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    within = (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / (n * (n - 1))
    return float(within - 2 * xy.mean())


def precision_recall(
    reference_features: Array,
    sample_features: Array,
    k: int = 3,
    exact: bool = False,
    device: torch.device | str | None = None,
    block_size: int = 10_000,
) -> tuple[float, float]:
    """Return improved precision and recall.

    Precision is the share of samples within the ball of any reference image, whose radius is the distance to
    its k-th nearest neighbour among the reference images; recall exchanges the two sets.

    Args:
        reference_features, sample_features: (N, F) and (M, F).
        exact: distances in fp32. The default rounds as the original does, in fp16, and takes fp32 for a block
            in which a distance overflows.
        device: where to compute; None: where the features are.
        block_size: rows and columns of distances held at a time.

    Raises:
        ValueError: a set of no more than k members, feature lengths that differ, or features that are not
            finite.
    """
    reference, samples = _comparable(reference_features, sample_features, at_least=k + 1, device=device)
    reference_radii, sample_radii = (
        _radii(features, k, exact, block_size) for features in (reference, samples)
    )
    covered_reference, covered_samples = (
        torch.zeros(len(f), dtype=torch.bool, device=f.device) for f in (reference, samples)
    )
    # Rows are reference images and columns samples, as in the original: fp16 rounds the two orders
    # differently.
    for i in range(0, len(reference), block_size):
        rows = slice(i, i + block_size)
        for j in range(0, len(samples), block_size):
            columns = slice(j, j + block_size)
            distances = _squared_distances(reference[rows], samples[columns], exact)
            covered_samples[columns] |= (distances <= reference_radii[rows, None]).any(dim=0)
            covered_reference[rows] |= (distances <= sample_radii[columns]).any(dim=1)
    return float(covered_samples.double().mean()), float(covered_reference.double().mean())


def _comparable(
    reference_features: Array, sample_features: Array, at_least: int, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    reference, samples = (torch.as_tensor(f, device=device) for f in (reference_features, sample_features))
    if reference.shape[1] != samples.shape[1]:
        raise ValueError(f"feature lengths {reference.shape[1]} and {samples.shape[1]} must be equal")
    for name, features in (("reference", reference), ("sample", samples)):
        if len(features) < at_least:
            raise ValueError(f"{len(features)} {name} features are too few: at least {at_least} are needed")
        if not features.isfinite().all():
            raise ValueError(f"the {name} features must be finite")
    return reference, samples


def _radii(features: torch.Tensor, k: int, exact: bool, block_size: int) -> torch.Tensor:
    """Return the squared distance (N,) of each member to its k-th nearest neighbour, itself not counted."""
    radii = []
    for rows in features.split(block_size):
        nearest = torch.empty(len(rows), 0, device=features.device)
        for columns in features.split(block_size):
            nearest = torch.cat([nearest, _squared_distances(rows, columns, exact)], dim=1)
            nearest = nearest.topk(
                min(k + 1, nearest.shape[1]), largest=False
            ).values  # (rows, k + 1), ascending
        radii.append(nearest[:, k])
    return torch.cat(radii)


@strict_fp32()
def _squared_distances(a: torch.Tensor, b: torch.Tensor, exact: bool) -> torch.Tensor:
    """Return the squared distances (n, m) fp32 of a (n, F) and b (m, F)."""
    # |a - b|^2 = |a|^2 - 2 a.b + |b|^2
    if not exact:
        # PARITY: inputs, squares, norms, product and sums are rounded to fp16; sums over features accumulate
        # in fp32.
        half_a, half_b = a.half(), b.half()
        norms_a, norms_b = (x.square().float().sum(dim=1).half() for x in (half_a, half_b))
        distances = (half_a.float() @ half_b.float().T).half()
        distances = distances.mul_(-2).add_(norms_a[:, None]).add_(norms_b).clamp_(min=0).float()
        if distances.isfinite().all():
            return distances
    a, b = a.float(), b.float()
    return (a.square().sum(dim=1)[:, None] - 2 * a @ b.T + b.square().sum(dim=1)).clamp_(min=0)
