"""Two sets of features that can be compared, as arrays or tensors."""

import numpy as np
import torch

Array = np.ndarray | torch.Tensor


def comparable(
    reference_features: Array, sample_features: Array, at_least: int, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sets of features as tensors; raise a ValueError where they cannot be compared."""
    reference, samples = (torch.as_tensor(f, device=device) for f in (reference_features, sample_features))
    if reference.shape[1] != samples.shape[1]:
        raise ValueError(f"feature lengths {reference.shape[1]} and {samples.shape[1]} must be equal")
    for name, features in (("reference", reference), ("sample", samples)):
        if len(features) < at_least:
            raise ValueError(f"{len(features)} {name} features are too few: at least {at_least} are needed")
        if not features.isfinite().all():
            raise ValueError(f"the {name} features must be finite")
    return reference, samples
