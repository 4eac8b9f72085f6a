"""The inception score. [ADM]"""

import torch

from evaluation.metrics.comparable import Array
from evaluation.statistics import SplitScores


def inception_score(probs: Array, split_size: int = 5000) -> float:
    """Return the mean over contiguous splits, in the given order, of exp(E KL(p(y|x) || p(y))).

    Args:
        probs: (N, classes) probabilities; a short last split counts like the others.
    """
    probs = torch.as_tensor(probs)
    return SplitScores(len(probs), probs.shape[1], split_size, probs.device).update(0, probs).score()
