"""Improved precision and recall, as the ADM suite computes them. [ADM]"""

from math import isqrt

import torch

from evaluation.metrics import FeatureMetric
from evaluation.precision import strict_fp32

MAX_BLOCK = 10_000
BYTES_PER_DISTANCE = 20  # including the fp16 and fp32 copies and the sorted ones


class PrecisionRecall(FeatureMetric):
    """Improved precision and recall.

    The ball of a reference image reaches to its k-th nearest neighbour among the reference images. Precision
    is the share of samples inside any of these balls. Recall exchanges the two sets.

    Args:
        features: name of the detector's features.
        exact: compute distances in fp32. The default rounds them to fp16 like the original, and uses fp32 for
            a block in which a distance overflows.
        max_images: see FeatureMetric.
        prefix: of the names of the scores.
    """

    higher_is_better = True

    def __init__(
        self,
        exact: bool = False,
        k: int = 3,
        features: str = "pool",
        max_images: int | None = None,
        prefix: str = "",
    ):
        super().__init__(features, max_images)
        self.keys = (f"{prefix}precision", f"{prefix}recall")
        self.k, self.exact = k, exact
        self.min_images = k + 1

    def compare(self, reference: torch.Tensor, samples: torch.Tensor) -> tuple[float, float]:
        block_size = _block_size(reference.device)
        reference_radii, sample_radii = (
            _radii(f, self.k, self.exact, block_size) for f in (reference, samples)
        )
        covered_reference, covered_samples = (
            torch.zeros(len(f), dtype=torch.bool, device=f.device) for f in (reference, samples)
        )
        # PARITY: rows are reference images, columns samples: fp16 rounds the two orders differently.
        for i in range(0, len(reference), block_size):
            rows = slice(i, i + block_size)
            for j in range(0, len(samples), block_size):
                columns = slice(j, j + block_size)
                distances = _squared_distances(reference[rows], samples[columns], self.exact)
                covered_samples[columns] |= (distances <= reference_radii[rows, None]).any(dim=0)
                covered_reference[rows] |= (distances <= sample_radii[columns]).any(dim=1)
        return float(covered_samples.double().mean()), float(covered_reference.double().mean())


def _block_size(device: torch.device) -> int:
    """Return a block size whose distances take at most half of a GPU's free memory."""
    if device.type != "cuda":
        return MAX_BLOCK
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(MAX_BLOCK, isqrt(free // 2 // BYTES_PER_DISTANCE)))


def _radii(features: torch.Tensor, k: int, exact: bool, block_size: int) -> torch.Tensor:
    """Return the squared distance (N,) of each member to its k-th nearest neighbour, itself excluded."""
    radii = []
    for rows in features.split(block_size):
        nearest = torch.empty(len(rows), 0, device=features.device)
        for columns in features.split(block_size):
            distances = torch.cat([nearest, _squared_distances(rows, columns, exact)], dim=1)
            num_nearest = min(k + 1, distances.shape[1])
            nearest = distances.topk(num_nearest, largest=False).values  # (rows, k + 1), ascending
        radii.append(nearest[:, k])
    return torch.cat(radii)


@strict_fp32()
def _squared_distances(a: torch.Tensor, b: torch.Tensor, exact: bool) -> torch.Tensor:
    # |a - b|^2 = |a|^2 - 2 a.b + |b|^2
    if not exact:
        # PARITY: all terms are rounded to fp16; sums over features accumulate in fp32.
        half_a, half_b = a.half(), b.half()
        norms_a, norms_b = (x.square().float().sum(dim=1).half() for x in (half_a, half_b))
        distances = (half_a.float() @ half_b.float().T).half()
        distances = distances.mul_(-2).add_(norms_a[:, None]).add_(norms_b).clamp_(min=0).float()
        if distances.isfinite().all():
            return distances
    a, b = a.float(), b.float()
    return (a.square().sum(dim=1)[:, None] - 2 * a @ b.T + b.square().sum(dim=1)).clamp_(min=0)
