"""Keep random tokens, drawn independently for each sample, as in the final version of [TREAD]."""

import torch

from routing.tokens import keep_lowest


def random_router(
    x: torch.Tensor,
    num_kept: int,
    /,
    *,
    force_keep: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return ids_keep (N, K), drawn uniformly."""
    return keep_lowest(token_noise(x, generator) if noise is None else noise, num_kept, force_keep)


def token_noise(x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draw a number in [0, 1) per token of x (N, T, D), in fp32: ties in bf16 would favour low positions."""
    return torch.rand(x.shape[:2], generator=generator, device=x.device, dtype=torch.float32)
