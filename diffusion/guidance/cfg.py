"""Classifier-free guidance: away from the prediction without a class. [CFG]"""

from dataclasses import replace
from typing import Any

import torch

from diffusion.guidance.guidance import Branch, Guidance


class CFG(Guidance):
    """The weak branch is the same network on the null class."""

    def check(self, net: Any) -> None:
        """Raise a ValueError where there is no class to guide by."""
        if self.guidance_scale != 1 and not net.num_classes:
            raise ValueError(
                f"guidance.guidance_scale={self.guidance_scale} must be 1 for an unconditional network"
            )

    def weak(self, strong: Branch) -> Branch:
        """Return the branch of the null class."""
        null_class = strong.precond.net.num_classes
        return replace(strong, class_labels=torch.full_like(strong.class_labels, null_class))
