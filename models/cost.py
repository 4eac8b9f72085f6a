"""What a DiT costs: the exact FLOPs of its matrix products, attention included, with and without routes.

A multiplication and an addition are two FLOPs; papers often count the pair once (1 GMAC = 2 GFLOPs).
Everything is per image. Not counted: what is done element by element, the selection of tokens, the optimizer.

Shapes: L tokens in the sequence of a block, D channels of a token.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.nn as nn

from models.dit import DiT
from routing import grow_ratio, num_tokens_kept


@dataclass(frozen=True)
class Cost:
    """FLOPs of one image, dense and routed.

    Args:
        fp32_training_flops: those of a routed step that run outside autocast (`fp32_after_route`).
        fp32_slowdown: how many times as long a product takes there.
        ceiling: speed-up of a training step if every token that no mask forces to stay bypassed the windows;
            no ratio can give more with windows of this length.
    """

    num_parameters: int
    dense_forward_flops: int
    routed_forward_flops: int
    dense_training_flops: int
    routed_training_flops: int
    fp32_training_flops: int
    fp32_slowdown: float
    ceiling: float

    @property
    def predicted_speedup(self) -> float:
        """How much cheaper a routed training step is than a dense one: in FLOPs, those outside autocast at
        their own rate.
        """
        extra = (self.fp32_slowdown - 1) * self.fp32_training_flops
        return self.dense_training_flops / (self.routed_training_flops + extra)

    def describe(self) -> dict[str, float]:
        """Return all figures as plain types."""
        return {**asdict(self), "predicted_speedup": self.predicted_speedup}


def cost_of(
    net: DiT, ratios: Sequence[float] | None = None, mask_coverage: float = 0.0, fp32_slowdown: float = 1.0
) -> Cost:
    """Return what an image costs.

    Args:
        ratios: ratio of each route; None takes the routes' own.
        mask_coverage: fraction of an image's tokens that a mask forces to stay, in [0, 1]; the windows grow
            to hold them.
        fp32_slowdown: how many times as long a product takes outside autocast as under it, on the device that
            is meant; 1 where there is no autocast.
    """
    num_forced = math.ceil(mask_coverage * net.num_tokens)
    own = [route.selection_ratio for route in net.routes] if ratios is None else ratios
    kept = [num_tokens_kept(net.num_tokens, grow_ratio(ratio, net.num_tokens, num_forced)) for ratio in own]
    forced = [num_forced] * len(kept)
    dense, routed, least = (
        _block_lengths(net, tokens) for tokens in ([net.num_tokens] * len(kept), kept, forced)
    )
    fp32, least_fp32 = (_fp32_training_flops(net, *step) for step in ((kept, routed), (forced, least)))
    return Cost(
        num_parameters=sum(parameter.numel() for parameter in net.parameters()),
        dense_forward_flops=_forward_flops(net, dense),
        routed_forward_flops=_forward_flops(net, routed),
        dense_training_flops=_training_flops(net, dense),
        routed_training_flops=_training_flops(net, routed),
        fp32_training_flops=fp32,
        fp32_slowdown=fp32_slowdown,
        ceiling=_training_flops(net, dense)
        / (_training_flops(net, least) + (fp32_slowdown - 1) * least_fp32),
    )


def _block_lengths(net: DiT, num_kept: Sequence[int]) -> list[int]:
    """Return the length of the sequence in each block where each route keeps so many tokens."""
    lengths = [net.num_tokens] * len(net.blocks)
    for route, kept in zip(net.routes, num_kept, strict=True):
        window = range(route.start_layer_idx, route.end_layer_idx + 1)
        for idx in window if net.removal else ():
            lengths[idx] = kept
    return [net.num_prefix_tokens + length for length in lengths]


def _forward_flops(net: DiT, lengths: Sequence[int]) -> int:
    blocks = sum(_block_flops(block, length) for block, length in zip(net.blocks, lengths, strict=True))
    final = net.num_tokens * _linear_flops(net.final_layer.linear) + _linear_flops(
        net.final_layer.adaLN_modulation
    )
    return _first_layers_flops(net) + _linear_flops(net.t_embedder.mlp[2]) + blocks + final


def _training_flops(net: DiT, lengths: Sequence[int]) -> int:
    # Backward: the gradient of the input and that of the weight cost one forward each. The first layers need
    # no gradient of their input.
    flops = 3 * _forward_flops(net, lengths) - _first_layers_flops(net)
    if net.gradient_checkpointing:
        flops += sum(_block_flops(block, length) for block, length in zip(net.blocks, lengths, strict=True))
    return flops


def _fp32_training_flops(net: DiT, num_kept: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the FLOPs of the blocks right after the windows that tokens bypass, where these run outside
    autocast.
    """
    if not net.fp32_after_route:
        return 0
    after = [
        route.end_layer_idx + 1
        for route, kept in zip(net.routes, num_kept, strict=True)
        if kept < net.num_tokens
    ]
    passes = 4 if net.gradient_checkpointing else 3
    return passes * sum(_block_flops(net.blocks[idx], lengths[idx]) for idx in after if idx < len(net.blocks))


def _first_layers_flops(net: DiT) -> int:
    return 2 * net.num_tokens * net.x_embedder.proj.weight.numel() + _linear_flops(net.t_embedder.mlp[0])


def _block_flops(block: nn.Module, length: int) -> int:
    hidden_size = block.attn.proj.in_features
    by_token = _linear_flops(block.attn) + _linear_flops(block.mlp)
    # Attention: q k^T and the product with v, 2 L^2 D FLOPs each.
    return length * by_token + 4 * length**2 * hidden_size + _linear_flops(block.adaLN_modulation)


def _linear_flops(module: nn.Module) -> int:
    """Return the FLOPs of all linear layers for one token: two for each weight."""
    return sum(2 * layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))
