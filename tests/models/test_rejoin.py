"""Modules by which tokens rejoin after a window, and networks that skip windows."""

from functools import partial

import pytest
import torch

from models.rejoin import Bypass, Fuse, Mask
from routing import Route, Routing, grid_router
from tests.networks import seeded, small_batch, small_dit

SPARSE = Route(0.75, 2, -3)
KEPT_PATH = partial(Fuse, path_drop_prob=0.0)
REJOINS, IDS = [Bypass, KEPT_PATH, Mask], ["bypass", "fuse", "mask"]


def fused_net(rejoin=KEPT_PATH, **arguments):
    return small_dit([SPARSE], router=grid_router, rejoin=rejoin, **arguments)


def test_the_mask_token_is_saved_and_only_the_one_of_mask_is_trained():
    for rejoin in (Fuse, Mask):
        net = fused_net(rejoin)
        assert net.state_dict()["rejoins.0.mask_token"].std() > 0
        assert ("rejoins.0.mask_token" in dict(net.named_parameters())) == (rejoin is Mask)


@pytest.mark.parametrize("rejoin", REJOINS, ids=IDS)
def test_a_ratio_of_zero_sends_all_tokens_through(rejoin):
    """`train()` and `eval()` mode agree bitwise."""
    net = fused_net(rejoin, class_dropout_prob=0.0)
    outputs = [net.train(mode)(*small_batch(), routing=Routing(0)) for mode in (True, False)]
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], net.train()(*small_batch()))


@pytest.mark.parametrize("rejoin", REJOINS, ids=IDS)
@pytest.mark.parametrize("routes", [(SPARSE,), (Route(0.5, 0, 1), Route(0.5, 2, -1))])
def test_a_ratio_of_one_skips_the_windows(rejoin, routes):
    net = small_dit(routes, rejoin=rejoin).eval()
    ran = []
    for idx, block in enumerate(net.blocks):
        block.register_forward_hook(lambda *_, idx=idx: ran.append(idx))
    output = net(*small_batch(), routing=Routing(1))
    inside = {idx for r in net.routes for idx in range(r.start_layer_idx, r.end_layer_idx + 1)}
    assert ran == [idx for idx in range(8) if idx not in inside]
    assert not torch.equal(output, net(*small_batch()))


def test_a_dropped_path_is_a_skipped_window():
    """Samples drop their windows independently, with the given probability, only in training."""
    torch.manual_seed(1)
    fuse, original = Fuse(torch.zeros(1, 3, 4), path_drop_prob=0.25), torch.randn(4000, 3, 4)
    routed = torch.randn(4000, 3, 4)
    kept, skipped = fuse.eval()(routed, None, original), fuse(None, None, original)
    trained, again = (fuse.train()(routed, None, original, seeded()) for _ in range(2))
    assert torch.equal(trained, again)
    is_dropped = (trained == skipped).flatten(1).all(dim=1)
    assert is_dropped.float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert torch.equal(trained[~is_dropped], kept[~is_dropped])
    assert torch.equal(fuse(None, None, original), skipped)


def test_only_path_drop_draws_more_than_the_tokens():
    states = []
    for rejoin in (Bypass, KEPT_PATH, Fuse, Mask):
        generator = seeded()
        fused_net(rejoin).train()(*small_batch(), generator=generator)
        states.append(generator.get_state())
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[3])
    assert not torch.equal(states[0], states[2])


def test_the_mask_token_takes_part_in_a_dense_step():
    """Processes that average gradients wait for a gradient of each parameter."""
    net = fused_net(Mask).train()
    net(*small_batch(), routing=Routing(0)).sum().backward()
    assert (net.rejoins[0].mask_token.grad == 0).all()
