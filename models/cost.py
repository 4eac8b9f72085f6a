"""FLOPs of a backbone for one image, with and without routes: matrix products, attention included.

Papers often count a multiplication and an addition once (1 GMAC = 2 GFLOPs). Elementwise operations, the
selection of tokens and the optimizer are not counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from models.backbone import Backbone
from routing import grow_ratio, num_tokens_kept


@dataclass(frozen=True)
class Cost:
    """FLOPs of one image, dense and routed.

    Args:
        fp32_training_flops: the part of a routed step that runs outside autocast.
        predicted_speedup: dense over routed cost of a training step. Products outside autocast count
            `fp32_slowdown` times.
    """

    num_parameters: int
    dense_forward_flops: int
    routed_forward_flops: int
    dense_training_flops: int
    routed_training_flops: int
    fp32_training_flops: int
    predicted_speedup: float


def cost_of(
    net: Backbone,
    ratios: Sequence[float] | None = None,
    mask_coverage: float = 0.0,
    fp32_slowdown: float = 1.0,
) -> Cost:
    """Compute the cost of an image.

    Args:
        ratios: selection ratio of each route; None: each route's `selection_ratio`.
        mask_coverage: fraction of an image's tokens that a mask forces to stay, in [0, 1].
        fp32_slowdown: time of a matrix product outside autocast over its time under it; 1 without autocast.
    """
    T = net.num_tokens
    num_forced = math.ceil(mask_coverage * T)
    ratios = [route.selection_ratio for route in net.routes] if ratios is None else ratios
    kept = [num_tokens_kept(T, grow_ratio(ratio, T, num_forced)) for ratio in ratios]
    dense, routed = net.flops([T] * len(kept)), net.flops(kept)
    return Cost(
        num_parameters=sum(parameter.numel() for parameter in net.parameters()),
        dense_forward_flops=dense.forward,
        routed_forward_flops=routed.forward,
        dense_training_flops=dense.training,
        routed_training_flops=routed.training,
        fp32_training_flops=routed.fp32_training,
        predicted_speedup=dense.training / (routed.training + (fp32_slowdown - 1) * routed.fp32_training),
    )
