"""What all guidance shares: a strong and a weak prediction, and a step from the weak past the strong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion.objective import Precond
from diffusion.path import Denoise
from runtime.errors import check_not_negative


@dataclass(frozen=True)
class Branch:
    """A prediction: a preconditioned network, the labels (N,) that it is given, and what its routes do."""

    precond: Precond
    class_labels: torch.Tensor | None
    routing: Any = None

    def shares_forward(self, other: "Branch") -> bool:
        """Return whether one forward of a larger batch gives both."""
        return self.precond is other.precond and self.routing is None and other.routing is None


def predict(branches: Sequence[Branch], x: torch.Tensor, t: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return D_x (N, C, H, W) of each branch, in one forward where they share a network without routing."""
    first = branches[0]
    if len(branches) > 1 and all(first.shares_forward(branch) for branch in branches):
        labels = torch.cat([branch.class_labels for branch in branches])
        return first.precond(torch.cat([x] * len(branches)), t, labels).chunk(len(branches))
    return [branch.precond(x, t, branch.class_labels, routing=branch.routing) for branch in branches]


class Guidance:
    """A sibling writes `weak`, and `scale` where the scale depends on the time.

    Args:
        guidance_scale: w; 1 is the strong prediction alone, at the cost of one.
    """

    def __init__(self, guidance_scale: float = 1.0):
        check_not_negative("guidance.guidance_scale", guidance_scale)
        self.guidance_scale = guidance_scale

    def check(self, net: Any) -> None:
        """Raise a ValueError where this guidance has no meaning for a backbone."""

    def weak(self, strong: Branch) -> Branch:
        """Return what is stepped away from."""
        raise NotImplementedError

    def scale(self, t: torch.Tensor) -> float:
        """Return w at time t, 0-d."""
        return self.guidance_scale

    def __call__(self, strong: Branch) -> Denoise:
        """Return denoise(x, t) -> D_x, for x (N, C, H, W) and t 0-d."""
        self.check(strong.precond.net)

        def denoise(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            w = self.scale(t)
            if w == 1:
                return predict([strong], x, t)[0]
            D_s, D_w = predict([strong, self.weak(strong)], x, t)
            # D = D_w + w (D_s - D_w), [CFG] eq. 6 with w = 1 for no guidance.
            return D_w + w * (D_s - D_w)

        return denoise
