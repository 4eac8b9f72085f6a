"""Draw the tokens that a window processes, take them out of the sequence, and put them back.

Shapes: N samples, T tokens, K tokens kept (processed by the window), D channels.

DEVIATION: the kept tokens stay in ascending order (the official code leaves them shuffled). Attention does not see the
difference; operators that depend on the order of the sequence do.
"""

from decimal import Decimal

import torch


def num_tokens_kept(num_tokens: int, selection_ratio: float) -> int:
    """Return K = T - int(T * selection_ratio), computed on the decimal value of the ratio.

    Floating point alone gives int(100 * 0.29) = 28; the rule that users read says 29.
    """
    return num_tokens - int(num_tokens * Decimal(str(selection_ratio)))


def sample_ids_keep(
    num_samples: int,
    num_tokens: int,
    selection_ratio: float,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Draw, for each sample on its own, the tokens that stay in the window, uniformly at random.

    Args:
        selection_ratio: fraction of tokens that bypass the window.
        generator: source of randomness, on `device`; None is the default generator of the device.

    Returns:
        (N, K) int64 indices, unique and ascending in each row.
    """
    num_kept = num_tokens_kept(num_tokens, selection_ratio)
    # fp32 whatever the autocast: bf16 has 256 levels in [0.5, 1), and ties would favour low positions.
    noise = torch.rand(num_samples, num_tokens, generator=generator, device=device, dtype=torch.float32)  # (N, T)
    ids_keep = noise.argsort(dim=1)[:, :num_kept]  # (N, K)
    return ids_keep.sort(dim=1).values


def gather_tokens(x: torch.Tensor, ids_keep: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Take each sample's kept tokens out of any tensor (N, ..., T, ...) that is indexed by token along `dim`."""
    index = ids_keep.view(ids_keep.shape[0], *(ids_keep.shape[1] if d == dim else 1 for d in range(1, x.dim())))
    return x.gather(dim, index.expand(*(ids_keep.shape[1] if d == dim else size for d, size in enumerate(x.shape))))


def start_route(x: torch.Tensor, ids_keep: torch.Tensor) -> torch.Tensor:
    """Leave only the kept tokens: (N, T, D) -> (N, K, D)."""
    return gather_tokens(x, ids_keep)


def end_route(routed: torch.Tensor, ids_keep: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Put the processed tokens back among those that bypassed the window: (N, K, D) -> (N, T, D).

    Args:
        routed: (N, K, D) kept tokens after the window.
        ids_keep: (N, K) the indices that were given to `start_route`.
        original: (N, T, D) the sequence before the window, from which the bypassing tokens are taken unchanged.
    """
    index = ids_keep.unsqueeze(-1).expand_as(routed)
    # Autocast may have changed the precision within the window; the residual stream keeps its own.
    return original.scatter(1, index, routed.to(original.dtype))  # (N, T, D)
