"""Draw the tokens that a window processes, take them out of the sequence, and put them back.

Shapes: N samples, T tokens that may bypass, P prefix tokens before them that never do, K tokens kept
(processed by the window), D channels.

DEVIATION: the kept tokens stay in ascending order (the official code leaves them shuffled). Attention does
    not see the
difference; operators that depend on the order of the sequence do.
"""

from decimal import Decimal

import torch


def num_tokens_kept(num_tokens: int, selection_ratio: float) -> int:
    """Return K = T - int(T * selection_ratio), computed on the decimal value of the ratio.

    Floating point alone gives int(100 * 0.29) = 28; the rule that users read says 29.
    """
    return num_tokens - int(num_tokens * Decimal(str(selection_ratio)))


def token_importance(x: torch.Tensor) -> torch.Tensor:
    """Return the L1 norm of each token, in fp32 and without a gradient: (N, T, D) -> (N, T)."""
    return torch.linalg.vector_norm(x.detach(), ord=1, dim=-1, dtype=torch.float32)


def sample_ids_keep(
    num_samples: int,
    num_tokens: int,
    selection_ratio: float,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    importance: torch.Tensor | None = None,
    importance_weight: float = 0.0,
    force_keep: torch.Tensor | None = None,
    num_kept: int | None = None,
    num_prefix_tokens: int = 0,
) -> torch.Tensor:
    """Choose, for each sample on its own, the tokens that stay in the window: at random unless told
    otherwise.

    DEVIATION: the most important tokens are kept, as the documentation of SimpleTuner says; its code keeps
        the least.

    Args:
        num_tokens: T, without the prefix.
        selection_ratio: fraction of the T tokens that bypass the window.
        generator: source of randomness, on `device`; None is the default generator of the device.
        importance: (N, T) score of each token, higher is more important; see `token_importance`. At weight 0
            it only decides which forced tokens stay where not all of them fit.
        importance_weight: 0 draws at random, 1 keeps strictly the most important; in between the two are
            mixed.
        force_keep: (N, T) bool, tokens that must not bypass. Where a sample has more of them than fit, the
            most important of them stay (without `importance`: a random part); `RoutePlan` tells how that is
            avoided or counted.
        num_kept: K, where it is not to follow from the ratio.
        num_prefix_tokens: P tokens before the others that are kept always and do not count in the ratio.

    Returns:
        (N, P + K) int64 positions in the whole sequence of P + T tokens, unique and ascending in each row.

    Raises:
        ValueError: a ratio outside [0, 1); a weight outside [0, 1], or one above 0 without importance; scores
            or a mask that are not of the (N, T) tokens that may bypass; a K outside [1, T].
    """
    if not 0 <= importance_weight <= 1:
        raise ValueError(f"importance_weight={importance_weight} must be in [0, 1]")
    if importance_weight and importance is None:
        raise ValueError(f"importance_weight={importance_weight} needs the importance of each token")
    for name, given in (("importance", importance), ("force_keep", force_keep)):
        if given is not None and given.shape != (num_samples, num_tokens):
            raise ValueError(
                f"{name} of shape {tuple(given.shape)} must be of shape {(num_samples, num_tokens)}, without "
                "the prefix"
            )
    if force_keep is not None and force_keep.dtype != torch.bool:
        raise ValueError(f"force_keep of {force_keep.dtype} must be of torch.bool")
    if not 0 <= selection_ratio < 1:
        raise ValueError(f"selection_ratio={selection_ratio} must be in [0, 1)")
    if num_kept is None:
        num_kept = num_tokens_kept(num_tokens, selection_ratio)
    if not 1 <= num_kept <= num_tokens:
        raise ValueError(f"num_kept={num_kept} must be in [1, {num_tokens}]")
    # fp32 whatever the autocast: bf16 has 256 levels in [0.5, 1), and ties would favour low positions.
    noise = torch.rand(
        num_samples, num_tokens, generator=generator, device=device, dtype=torch.float32
    )  # (N, T)
    order = _order(noise, importance, importance_weight, force_keep)  # (N, T)
    ids_keep = order[:, :num_kept].sort(dim=1).values  # (N, K)
    if num_prefix_tokens:
        prefix = torch.arange(num_prefix_tokens, device=ids_keep.device).expand(num_samples, -1)
        ids_keep = torch.cat([prefix, ids_keep + num_prefix_tokens], dim=1)  # (N, P + K)
    return ids_keep


def _order(
    noise: torch.Tensor,
    importance: torch.Tensor | None,
    importance_weight: float,
    force_keep: torch.Tensor | None,
) -> torch.Tensor:
    """Return the tokens of each sample (N, T), those that are kept first at the front."""
    cost = noise
    if importance_weight == 1:
        cost = -importance  # not normalised: rounding would make ties of neighbours
    elif importance_weight:
        # cost = (1 - w) * noise - w * importance, the importance of each sample scaled to [0, 1]
        low, high = importance.aminmax(dim=1, keepdim=True)
        cost = noise.lerp(
            -(importance - low) / (high - low).clamp(min=torch.finfo(noise.dtype).tiny), importance_weight
        )
    if force_keep is None:
        return cost.argsort(dim=1)
    if importance is not None:
        cost = torch.where(force_keep, -importance, cost)
    # Two stable sorts: by cost, then the forced tokens to the front. Adding a large number to their scores
    # would round them.
    order = cost.argsort(dim=1, stable=True)
    forced_first = (~force_keep.gather(1, order)).to(torch.uint8).argsort(dim=1, stable=True)
    return order.gather(1, forced_first)


def gather_tokens(x: torch.Tensor, ids_keep: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Take each sample's kept tokens out of any tensor (N, ..., T, ...) that is indexed by token along `dim`,
    not the first.

    A table that all samples share, (1, ..., T, ...), becomes one for each sample.
    """
    dim %= x.dim()
    num_samples, num_kept = ids_keep.shape
    index = ids_keep.view(num_samples, *(num_kept if d == dim else 1 for d in range(1, x.dim())))
    shape = (num_samples, *(num_kept if d == dim else size for d, size in enumerate(x.shape) if d > 0))
    return x.expand(num_samples, *x.shape[1:]).gather(dim, index.expand(shape))


def start_route(x: torch.Tensor, ids_keep: torch.Tensor) -> torch.Tensor:
    """Leave only the kept tokens: (N, T, D) -> (N, K, D)."""
    return gather_tokens(x, ids_keep)


def end_route(routed: torch.Tensor, ids_keep: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Put the processed tokens back among those that bypassed the window: (N, K, D) -> (N, T, D).

    Args:
        routed: (N, K, D) kept tokens after the window.
        ids_keep: (N, K) the indices that were given to `start_route`.
        original: (N, T, D) the sequence before the window, from which the bypassing tokens are taken
            unchanged.
    """
    index = ids_keep.unsqueeze(-1).expand_as(routed)
    # Autocast may have changed the precision within the window; the residual stream keeps its own.
    return original.scatter(1, index, routed.to(original.dtype))  # (N, T, D)
