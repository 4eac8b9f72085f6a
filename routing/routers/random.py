"""Keep random tokens, drawn independently for each sample, as in the final version of [TREAD]."""

import torch

from routing.tokens import keep_lowest


def random_router(
    x: torch.Tensor,
    num_kept: int,
    /,
    *,
    share_over_batch: bool = False,
    force_keep: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return ids_keep (N, K), drawn uniformly.

    Args:
        share_over_batch: draw once for all samples. `force_keep` must then be equal for all.
    """
    noise = token_noise(x, generator, share_over_batch) if noise is None else noise
    return keep_lowest(noise, num_kept, force_keep)


def token_noise(
    x: torch.Tensor, generator: torch.Generator | None, share_over_batch: bool = False
) -> torch.Tensor:
    """Draw a number in [0, 1) per token of x (N, T, D), always in fp32: bf16 has few values, and ties would
    favour low positions.
    """
    shape = (1 if share_over_batch else x.shape[0], x.shape[1])
    noise = torch.rand(shape, generator=generator, device=x.device, dtype=torch.float32)
    return noise.expand(x.shape[:2])
