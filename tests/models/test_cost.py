import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import DiT, cost_of
from models.rejoin import Fuse, Mask
from routing import Route, Routing
from tests.networks import PAPER, SIZES, small_batch, small_dit

TWO_ROUTES = (Route(0.3, 0, 1), Route(0.7, 3, -1))
VARIANTS = [
    {},
    {"block": "sprint"},
    {"block": "modern"},
    {"block": "lightning"},
    {"block": "mamba", "num_prefix_tokens": 3},
    {"block": "rwkv"},
    {"block": "modern", "num_prefix_tokens": 3},
    {"learn_sigma": True, "mlp_ratio": 3.0},
    {"window": "context"},
    {"window": "separate"},
    {"block": "self_logit"},
    {"gradient_checkpointing": True},
    {"num_classes": 0},
    {"rejoin": Fuse},
    {"rejoin": Mask},
    {"rejoin": Fuse, "num_prefix_tokens": 3, "window": "context"},
]


def counted(net, ratios, backward):
    """Return the FLOPs that torch counts for two images, divided by two."""
    batch = small_batch(2, num_classes=net.num_classes)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = net(*batch, routing=Routing(ratios))
        if backward:
            output.sum().backward()
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


CASES = [({}, ()), ({}, (PAPER,)), *((variant, TWO_ROUTES) for variant in VARIANTS)]


@pytest.mark.parametrize(("variant", "routes"), CASES, ids=str)
def test_flops_are_those_that_torch_counts(variant, routes):
    net = small_dit(routes, **variant).train()
    cost = cost_of(net)
    dense = [0.0] * len(routes)
    assert counted(net, None, backward=False) == cost.routed_forward_flops
    assert counted(net, dense, backward=False) == cost.dense_forward_flops
    assert counted(net, None, backward=True) == cost.routed_training_flops
    assert counted(net, dense, backward=True) == cost.dense_training_flops
    skipped = counted(net, [1.0] * len(routes), backward=False)
    assert skipped == net.flops([0] * len(routes)).forward
    assert cost.predicted_speedup == cost.dense_training_flops / cost.routed_training_flops
    assert cost.num_parameters == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("size", "millions", "dense", "routed"),
    [("s", 33, 6.05, 4.20), ("b", 130, 23.0, 16.1), ("l", 458, 80.7, 48.2), ("xl", 675, 118.6, 69.1)],
)
def test_known_costs_at_256_tokens(size, millions, dense, routed):
    """Parameters are counted as in the DiT paper, with the position table and a learned variance."""
    with torch.device("meta"):
        net = DiT(32, 2, 4, *SIZES[size], routes=[PAPER])
    cost = cost_of(net)
    digits = 2 if size == "s" else 1
    assert round(cost.dense_forward_flops / 2e9, digits) == dense
    assert round(cost.routed_forward_flops / 2e9, digits) == routed
    count = sum(tensor.numel() for tensor in net.state_dict().values())
    count += sum(p.numel() for p in net.final_layer.linear.parameters())
    assert abs(count / 1e6 - millions) < 0.52


@pytest.mark.parametrize(
    ("size", "none", "tf32", "fp32"), [("b", 1.43, 1.28, 0.54), ("xl", 1.72, 1.62, 0.93)], ids=["B/2", "XL/2"]
)
def test_the_block_outside_autocast_counts_at_its_own_rate(size, none, tf32, fp32):
    """At the peak rates of an H200: 989 TFLOP/s in bf16, 495 in TF32, 67 in fp32."""
    with torch.device("meta"):
        plain, parity = (
            DiT(32, 2, 4, *SIZES[size], routes=[PAPER], fp32_after_route=on) for on in (False, True)
        )
    for slowdown, expected in ((1.0, none), (989 / 495, tf32), (989 / 67, fp32)):
        cost = cost_of(parity, fp32_slowdown=slowdown)
        assert cost.predicted_speedup == pytest.approx(expected, abs=0.01)
        assert cost_of(plain, fp32_slowdown=slowdown).predicted_speedup == pytest.approx(none, abs=0.01)
        for nothing_bypasses in ({"ratios": [0.0]}, {"mask_coverage": 1.0}):
            cost = cost_of(parity, **nothing_bypasses, fp32_slowdown=slowdown)
            assert cost.predicted_speedup == 1


@pytest.mark.parametrize(("fp32", "checkpointing"), [(False, False), (True, False), (True, True)])
def test_the_cost_model_knows_the_blocks_outside_autocast(fp32, checkpointing):
    """A block right before the next window has that window's length; none follows the last block."""
    routes = [Route(0.5, 1, 2), Route(0.25, 3, 4), Route(0.5, 6, -1)]
    net = small_dit(routes, fp32_after_route=fp32, gradient_checkpointing=checkpointing).train()
    dtypes, lengths = [], []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
        block.mlp.fc1.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        net(*small_batch(2))
    outside = [idx for idx, dtype in enumerate(dtypes) if dtype == torch.float32]
    assert outside == ([3, 5] if fp32 else [])
    expected = sum(net.blocks[idx].flops(lengths[idx]) for idx in outside)
    assert cost_of(net).fp32_training_flops == (3 + checkpointing) * expected


def test_masks_and_short_windows_lower_the_speedup():
    with torch.device("meta"):
        long, short = (DiT(32, 2, 4, 384, 12, 6, routes=[Route(0.5, 2, end)]) for end in (8, 4))
    masked, full = cost_of(long, mask_coverage=0.6), cost_of(long, mask_coverage=1.0)
    speedups = [cost_of(long, ratios=[ratio]).predicted_speedup for ratio in (0.0, 0.5, 0.75)]
    assert speedups == sorted(set(speedups)) and speedups[0] == 1
    assert 1 < cost_of(short).predicted_speedup < speedups[1]
    assert 1 < masked.predicted_speedup < speedups[1]
    assert masked == cost_of(long, mask_coverage=154 / 256)  # 153.6 tokens
    assert full.predicted_speedup == 1
