"""Keep the tokens with the largest L1 norm, or mix the norm with random noise.

DEVIATION: the largest norms stay, as the documentation of SimpleTuner says; its code keeps the smallest.
"""

import torch

from routing.routers.random import token_noise
from routing.tokens import keep_lowest


def norm_router(
    x: torch.Tensor,
    num_kept: int,
    /,
    *,
    weight: float = 1.0,
    force_keep: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return ids_keep (N, K) by the L1 norm of each token.

    Args:
        weight: weight of the norm against the noise, in (0, 1]; 1 keeps exactly the largest norms.
    """
    if not 0 < weight <= 1:
        raise ValueError(f"model.router.weight={weight} must be in (0, 1]")
    if noise is None:
        noise = token_noise(x, generator)  # drawn at weight 1 too, so that later draws are the same
    dtype = torch.promote_types(x.dtype, torch.float32)  # it must be at least as wide as x
    norms = torch.linalg.vector_norm(x.detach(), ord=1, dim=-1, dtype=dtype).to(noise.dtype)  # (N, T)
    if weight == 1:
        return keep_lowest(-norms, num_kept, force_keep)  # unscaled: rounding would create ties
    # cost = (1 - weight) * noise - weight * norm, where the norms of each sample are scaled to [0, 1]
    low, high = norms.aminmax(dim=1, keepdim=True)
    scaled = (norms - low) / (high - low).clamp(min=torch.finfo(norms.dtype).tiny)
    return keep_lowest(noise.lerp(-scaled, weight), num_kept, force_keep)
