"""The Vendi score, an effective number of different images. [Vendi]"""

import torch

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.statistics import AllFeatures


class VendiScore(Metric):
    """The effective number of different samples; it uses no reference.

    It is N for N orthogonal features, and 1 for equal ones.

    Args:
        features: name of the detector's features.
    """

    keys = ("vendi",)
    higher_is_better = True
    needs_of_reference = ()

    def __init__(self, features: str):
        self.features, self.needs = features, ((AllFeatures, features),)

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        x = torch.as_tensor(samples[AllFeatures, self.features].features).double()
        norms = x.norm(dim=-1, keepdim=True)
        if x.ndim != 2 or not len(x) or not (norms.isfinite().all() and norms.min() > 0):
            rule = "(number of images, number of features), finite, and not zero"
            raise ValueError(f"features {tuple(x.shape)} of the Vendi score must be {rule}")
        x = x / norms  # (N, F)
        # X X^T and X^T X have the same eigenvalues, except zeros.
        gram = x @ x.T if len(x) < x.shape[1] else x.T @ x
        values = torch.linalg.eigvalsh(gram / len(x)).clamp(min=0)  # of X X^T / N
        # exp(-sum v log v)
        return {"vendi": float((-torch.special.xlogy(values, values).sum()).exp())}
