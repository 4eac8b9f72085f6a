"""Choose the tokens of each sample that stay in a window, take them out, and put them back.

Shapes: N samples, T tokens that may bypass, P prefix tokens before them that never bypass, K kept tokens
(the window processes them), D channels.

DEVIATION: kept tokens are in ascending order; the official code leaves them shuffled. Attention ignores the
order, other operators (scans, convolutions) do not.
"""

from decimal import Decimal

import torch


def num_tokens_kept(num_tokens: int, selection_ratio: float) -> int:
    """Return K = T - int(T * selection_ratio), computed on the decimal value of the ratio.

    In floating point int(100 * 0.29) is 28, not 29.
    """
    return num_tokens - int(num_tokens * Decimal(str(selection_ratio)))


def sample_ids_keep(
    num_samples: int,
    num_tokens: int,
    selection_ratio: float,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    force_keep: torch.Tensor | None = None,
    num_prefix_tokens: int = 0,
) -> torch.Tensor:
    """Draw the tokens that stay in the window, independently for each sample, for your own training loop.

    Args:
        num_tokens: T, without the prefix.
        selection_ratio: fraction of the T tokens that bypass the window, in [0, 1).
        generator: random generator on `device`; None: the default generator of the device.
        force_keep: (N, T) bool, tokens that must not bypass. If there are more than K, a random K of
            them stay.
        num_prefix_tokens: P, tokens at the start of the sequence, all of which stay.

    Returns:
        (N, P + K) int64 positions in the sequence of P + T tokens, unique and ascending in each row.
    """
    if not 0 <= selection_ratio < 1:
        raise ValueError(f"selection_ratio={selection_ratio} must be in [0, 1)")
    num_kept = num_tokens_kept(num_tokens, selection_ratio)
    noise = torch.rand(num_samples, num_tokens, generator=generator, device=device, dtype=torch.float32)
    return with_prefix(keep_lowest(noise, num_kept, force_keep), num_prefix_tokens)


def keep_lowest(cost: torch.Tensor, num_kept: int, force_keep: torch.Tensor | None = None) -> torch.Tensor:
    """Return the positions (N, K) of the tokens with the lowest cost (N, T) in each sample, ascending.

    Args:
        force_keep: (N, T) bool, tokens that are taken before all others, in the order of their cost.

    Raises:
        ValueError: K is outside [1, T], or force_keep is not bool (N, T).
    """
    num_tokens = cost.shape[1]
    if not 1 <= num_kept <= num_tokens:
        raise ValueError(f"num_kept={num_kept} must be in [1, {num_tokens}]")
    order = cost.argsort(dim=1, stable=force_keep is not None)  # (N, T)
    if force_keep is not None:
        if force_keep.shape != cost.shape or force_keep.dtype != torch.bool:
            given = f"{force_keep.dtype} {tuple(force_keep.shape)}"
            raise ValueError(f"force_keep={given} must be torch.bool {tuple(cost.shape)}, without the prefix")
        # A second stable sort, because adding a large number to the cost of the others would round it.
        bypasses = (~force_keep.gather(1, order)).to(torch.uint8)
        order = order.gather(1, bypasses.argsort(dim=1, stable=True))
    return order[:, :num_kept].sort(dim=1).values  # (N, K)


def other_tokens(ids_keep: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the positions (N, T - K) of the tokens that are not kept, ascending."""
    is_kept = torch.zeros(len(ids_keep), num_tokens, dtype=torch.uint8, device=ids_keep.device)
    order = is_kept.scatter(1, ids_keep, 1).argsort(dim=1, stable=True)  # (N, T)
    return order[:, : num_tokens - ids_keep.shape[1]]


def with_prefix(ids_keep: torch.Tensor, num_prefix_tokens: int) -> torch.Tensor:
    """Return the positions (N, P + K) in a sequence that starts with P prefix tokens, which are all kept."""
    if not num_prefix_tokens:
        return ids_keep
    prefix = torch.arange(num_prefix_tokens, device=ids_keep.device).expand(ids_keep.shape[0], -1)
    return torch.cat([prefix, ids_keep + num_prefix_tokens], dim=1)


def gather_tokens(x: torch.Tensor, ids_keep: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Gather each sample's kept tokens from a tensor (N, ..., T, ...) that is indexed by token along `dim`.

    A tensor that all samples share, (1, ..., T, ...), becomes one per sample: (N, ..., K, ...).
    """
    dim %= x.dim()
    num_samples, num_kept = ids_keep.shape
    x = x.expand(num_samples, *x.shape[1:])
    index = ids_keep.view(num_samples, *[1] * (dim - 1), num_kept, *[1] * (x.dim() - dim - 1))
    return x.gather(dim, index.expand(*x.shape[:dim], num_kept, *x.shape[dim + 1 :]))


def start_route(x: torch.Tensor, ids_keep: torch.Tensor) -> torch.Tensor:
    """Take out the kept tokens: (N, T, D) -> (N, K, D)."""
    return gather_tokens(x, ids_keep)


def end_route(routed: torch.Tensor, ids_keep: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Put the processed tokens back into the sequence: (N, K, D) -> (N, T, D).

    Args:
        routed: (N, K, D), the kept tokens after the window.
        ids_keep: (N, K), the positions that were passed to `start_route`.
        original: (N, T, D), the sequence before the window. Bypassing tokens are taken from it unchanged.
    """
    index = ids_keep.unsqueeze(-1).expand_as(routed)
    # Autocast may have lowered the precision within the window; the residual stream keeps its dtype.
    return original.scatter(1, index, routed.to(original.dtype))  # (N, T, D)
