"""Classifier-free guidance. [CFG]"""

from collections.abc import Callable

import torch
import torch.nn as nn


def guided_denoiser(
    precond: nn.Module, class_labels: torch.Tensor | None, null_class: int, guidance_scale: float = 1.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return denoise(x, sigma) -> D_x with the labels closed over.

    Guidance acts on all channels. Both predictions come from one forward of twice the batch.

    Args:
        class_labels: (N,) int64; None for an unconditional network.
        null_class: the label of the unconditional prediction.
        guidance_scale: w; 1 is the conditional prediction alone, at half the cost.

    Raises:
        ValueError: guidance is asked of an unconditional network.
    """
    if guidance_scale == 1:
        return lambda x, sigma: precond(x, sigma, class_labels)
    if class_labels is None:
        raise ValueError(f"guidance.guidance_scale={guidance_scale} must be 1 for an unconditional network")
    both_labels = torch.cat([class_labels, torch.full_like(class_labels, null_class)])

    def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        D_cond, D_uncond = precond(torch.cat([x, x]), sigma, both_labels).chunk(2)
        # D = D_uncond + w (D_cond - D_uncond), [CFG] eq. 6 with w = 1 for no guidance.
        return D_uncond + guidance_scale * (D_cond - D_uncond)

    return denoise
