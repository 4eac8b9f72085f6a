"""Frechet distance, inception score, precision and recall as the ADM suite defines them. [ADM]

Everything takes numpy arrays or tensors and returns floats.
"""

import numpy as np
import torch

Array = np.ndarray | torch.Tensor


def frechet_distance(mu1: Array, sigma1: Array, mu2: Array, sigma2: Array) -> float:
    """Return the squared Frechet distance between two Gaussians.

    The trace of the matrix square root comes from symmetric eigenvalues, so that singular covariances give no complex
    numbers.

    Args:
        mu1, mu2: means (F,).
        sigma1, sigma2: covariances (F, F).

    Raises:
        ValueError: shapes that differ, or values that are not finite.
    """
    mu1, sigma1, mu2, sigma2 = (torch.as_tensor(a).double() for a in (mu1, sigma1, mu2, sigma2))
    if mu1.shape != mu2.shape or sigma1.shape != sigma2.shape:
        raise ValueError(f"features of {tuple(mu1.shape)} and {tuple(mu2.shape)} can not be compared")
    if not all(a.isfinite().all() for a in (mu1, sigma1, mu2, sigma2)):
        raise ValueError("means and covariances must be finite")
    values, vectors = torch.linalg.eigh(sigma1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    trace_of_root = torch.linalg.eigvalsh(root @ sigma2 @ root).clamp(min=0).sqrt().sum()
    # d^2 = |mu1 - mu2|^2 + tr(sigma1 + sigma2 - 2 (sigma1 sigma2)^(1/2))
    return float((mu1 - mu2).square().sum() + sigma1.trace() + sigma2.trace() - 2 * trace_of_root)


def inception_score(probs: Array, split_size: int = 5000) -> float:
    """Return the mean over contiguous splits, in the given order, of exp(E KL(p(y|x) || p(y))).

    Args:
        probs: (N, classes) probabilities; a short last split counts like the others.
    """
    probs = torch.as_tensor(probs).double()
    scores = []
    for split in probs.split(split_size):
        marginal = split.mean(dim=0, keepdim=True)
        # xlogy: 0 log 0 = 0.
        divergence = torch.special.xlogy(split, split) - torch.special.xlogy(split, marginal)
        scores.append(divergence.sum(dim=1).mean().exp())
    return float(torch.stack(scores).mean())


def precision_recall(
    reference_features: Array,
    sample_features: Array,
    k: int = 3,
    exact: bool = False,
    device: torch.device | str | None = None,
    block_size: int = 10_000,
) -> tuple[float, float]:
    """Return improved precision and recall.

    Precision is the share of samples within the ball of any reference image, whose radius is the distance to its k-th
    nearest neighbour among the reference images; recall exchanges the two sets.

    Args:
        reference_features, sample_features: (N, F) and (M, F).
        exact: distances in fp32. The default rounds as the original does, in fp16, unless a distance overflows.
        block_size: rows and columns of distances held at a time.

    Raises:
        ValueError: a set of no more than k members, or feature lengths that differ.
    """
    reference, samples = (torch.as_tensor(f, device=device) for f in (reference_features, sample_features))
    if reference.shape[1] != samples.shape[1]:
        raise ValueError(f"feature lengths {reference.shape[1]} and {samples.shape[1]} must be equal")
    for name, features in (("reference", reference), ("sample", samples)):
        if len(features) <= k:
            raise ValueError(f"{len(features)} {name} features must be more than k={k}")
    precision = _covered(samples, reference, _radii(reference, k, exact, block_size), exact, block_size)
    recall = _covered(reference, samples, _radii(samples, k, exact, block_size), exact, block_size)
    return precision, recall


def _radii(features: torch.Tensor, k: int, exact: bool, block_size: int) -> torch.Tensor:
    """Return the squared distance (N,) of each member to its k-th nearest neighbour, itself not counted."""
    radii = []
    for rows in features.split(block_size):
        nearest = [_squared_distances(rows, block, exact).float() for block in features.split(block_size)]
        radii.append(torch.cat([d.topk(min(k + 1, d.shape[1]), largest=False).values for d in nearest], dim=1))
    return torch.cat([r.sort(dim=1).values[:, k] for r in radii])


def _covered(points: torch.Tensor, centres: torch.Tensor, radii: torch.Tensor, exact: bool, block_size: int) -> float:
    """Return the share of points that lie within the ball of at least one centre."""
    covered = []
    for rows in points.split(block_size):
        inside = torch.zeros(len(rows), dtype=torch.bool, device=points.device)
        for block, radius in zip(centres.split(block_size), radii.split(block_size), strict=True):
            inside |= (_squared_distances(rows, block, exact).float() <= radius).any(dim=1)
        covered.append(inside)
    return float(torch.cat(covered).double().mean())


def _squared_distances(a: torch.Tensor, b: torch.Tensor, exact: bool) -> torch.Tensor:
    # |a - b|^2 = |a|^2 - 2 a.b + |b|^2
    if not exact:
        # Inputs, norms, product and sum are rounded to fp16; products accumulate in fp32.
        half_a, half_b = a.half(), b.half()
        norms_a, norms_b = (x.float().square().sum(dim=1).half() for x in (half_a, half_b))
        product = (half_a.float() @ half_b.float().T).half()
        distances = (norms_a[:, None] - 2 * product + norms_b).clamp(min=0)
        if distances.isfinite().all():
            return distances
    a, b = a.float(), b.float()
    return (a.square().sum(dim=1)[:, None] - 2 * a @ b.T + b.square().sum(dim=1)).clamp(min=0)
