"""Mamba and RWKV mixers against their recurrences, token by token, with and without gaps."""

import pytest
import torch
import torch.nn.functional as F

from models.mixers import ChannelMix, SpatialMix, StateSpace, column_ranks
from models.mixers.state_space import CONV_SIZE
from tests.networks import small_dit

GRID, D, H = 4, 12, 6
KEPT = torch.tensor([[0, 3, 5, 6, 11, 12], [1, 2, 7, 9, 13, 14]])  # of 16
DIRECTIONS = [
    lambda row, column: (row, column),
    lambda row, column: (-row, -column),
    lambda row, column: (column, row),
    lambda row, column: (-column, -row),
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randomised(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def recurrence(mixer, x, indices, steps=None):
    """Mix one sample (L, D), whose tokens have these indices in the grid, head by head and token by token.

    Args:
        steps: (H, L) used instead of dt, without the convolution.
    """
    z, v, b, c, dt = mixer.in_proj(x).split(mixer.sizes, dim=-1)
    dt = F.softplus(dt + mixer.dt_bias).T if steps is None else steps  # (H, L)
    v, y = v.unflatten(-1, (H, -1)), torch.zeros_like(v.unflatten(-1, (H, -1)))
    kernel = mixer.conv.unflatten(0, (H, -1))
    for head in range(H):
        key = DIRECTIONS[head % 4]
        order = sorted(range(len(x)), key=lambda i: key(int(indices[i]) // GRID, int(indices[i]) % GRID))
        h = torch.zeros(v.shape[-1], b.shape[-1])
        for rank, i in enumerate(order):
            before = [order[rank - j] if rank >= j else None for j in range(CONV_SIZE)]
            taps = [kernel[head, :, -1 - j] * v[k, head] for j, k in enumerate(before) if k is not None]
            u = F.silu(sum(taps)) if steps is None else v[i, head]
            decay = torch.exp(-dt[head, i] * mixer.log_rate[head].exp())
            h = decay * h + dt[head, i] * torch.outer(u, b[i])
            y[i, head] = h @ c[i] + mixer.skip[head] * u
    return mixer.proj(mixer.norm(y.flatten(-2) * F.silu(z)))


@pytest.mark.parametrize("kept", [False, True], ids=["all", "kept"])
def test_the_state_space_is_its_recurrence_along_rows_and_columns(kept):
    """For all tokens, and for the tokens that a route kept, at their positions in the grid."""
    mixer = randomised(StateSpace(D, H))
    indices = KEPT if kept else torch.arange(16).expand(2, -1)
    x = torch.randn(2, indices.shape[1], D)
    positions = column_ranks(8, GRID, 0).expand(2, -1).gather(1, indices)
    expected = [recurrence(mixer, *sample) for sample in zip(x, indices, strict=True)]
    torch.testing.assert_close(mixer(x, positions), torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_the_prefix_comes_first_in_rows_and_columns():
    ranks = column_ranks(8, 3, 2)
    assert ranks.tolist() == [0, 1, 2, 5, 8, 3, 6, 9, 4, 7, 10]


def test_a_scan_does_not_decay_over_a_gap(monkeypatch):
    """The kept tokens see each other as in a dense scan in which the other tokens take no time."""
    mixer = randomised(StateSpace(D, H))
    monkeypatch.setattr(mixer, "_convolve", lambda x: x)
    x, kept = torch.randn(16, D), KEPT[0]
    dt = F.softplus(mixer.in_proj(x)[:, -H:] + mixer.dt_bias).T
    only_kept = torch.zeros_like(dt)
    only_kept[:, kept] = dt[:, kept]
    dense = recurrence(mixer, x, torch.arange(16), only_kept)
    routed = mixer(x[kept].unsqueeze(0), column_ranks(8, GRID, 0)[kept].unsqueeze(0))
    torch.testing.assert_close(routed[0], dense[kept], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(routed[0], recurrence(mixer, x, torch.arange(16), dt)[kept], atol=1e-3)


def weighted_mean(mixer, k, v):
    """Mix one sample (L, D) by a recurrence from each end, plus the token itself."""
    decay, sums = torch.exp(-mixer.log_decay.exp() / mixer.num_tokens), []
    for values in (v, torch.ones_like(v)):
        both = torch.exp(mixer.bonus + k) * values
        for order in (range(len(k)), reversed(range(len(k)))):
            state = torch.zeros_like(k[0])
            for t in order:
                both[t] = both[t] + state
                state = decay * state + torch.exp(k[t]) * values[t]
        sums.append(both)
    return sums[0] / sums[1]


def test_the_weighted_mean_of_rwkv_is_a_recurrence_from_each_end():
    mixer = randomised(SpatialMix(D, 4, num_tokens=16))
    k, v = torch.randn(2, 3, 11, D)
    expected = torch.stack([weighted_mean(mixer, *sample) for sample in zip(k, v, strict=True)])
    torch.testing.assert_close(mixer._weighted_mean(k, v), expected, atol=1e-5, rtol=1e-5)


def test_large_keys_and_fast_decays_give_finite_means():
    mixer = SpatialMix(D, 4, num_tokens=1)
    k, v = 1e4 * torch.randn(2, 9, D), torch.randn(2, 9, D)
    assert mixer._weighted_mean(k, v).isfinite().all()
    best = k.argmax(dim=1, keepdim=True)
    torch.testing.assert_close(mixer._weighted_mean(k, v).gather(1, best), v.gather(1, best))


def test_the_mixers_of_rwkv_by_hand():
    spatial, channel = randomised(SpatialMix(D, 4, 16)), randomised(ChannelMix(D, 24))
    x = torch.randn(2, 7, D)
    before = torch.cat([torch.zeros(2, 1, D), x[:, :-1]], dim=1)[..., : D // 2]
    after = torch.cat([x[:, 1:], torch.zeros(2, 1, D)], dim=1)[..., D // 2 :]
    shifted = torch.cat([before, after], dim=-1)

    def mixed(mix):
        return x + mix * (shifted - x)

    k, v, r = (
        linear(mixed(mix))
        for linear, mix in zip((spatial.key, spatial.value, spatial.receptance), spatial.mix, strict=True)
    )
    mean = spatial._weighted_mean(k, v).unflatten(-1, (4, -1))
    normed = F.layer_norm(mean, mean.shape[-1:], eps=1e-5).flatten(-2)
    normed = normed * spatial.norm.weight + spatial.norm.bias
    torch.testing.assert_close(spatial(x), spatial.proj(r.sigmoid() * normed), rtol=1e-5, atol=1e-6)
    inner = F.relu(channel.key(mixed(channel.mix[0]))).square()
    expected = channel.receptance(mixed(channel.mix[1])).sigmoid() * channel.value(inner)
    torch.testing.assert_close(channel(x), expected)


def test_steps_and_weights_are_fp32_under_autocast(monkeypatch):
    """The sum of step and bias, and the inputs of the weighted mean."""
    state_space, spatial, x, seen = StateSpace(D, H), SpatialMix(D, 4, 16), torch.randn(2, 16, D), []
    scan, weighted = state_space._scan, spatial._weighted_mean
    monkeypatch.setattr(state_space, "_scan", lambda x, dt, b, c: seen.append(dt) or scan(x, dt, b, c))
    monkeypatch.setattr(spatial, "_weighted_mean", lambda k, v: seen.extend((k, v)) or weighted(k, v))
    with torch.autocast("cpu", torch.bfloat16):
        projected = state_space.in_proj(x)[..., -H:]
        state_space(x, column_ranks(8, GRID, 0).unsqueeze(0))
        spatial(x)
    dt, k, v = seen
    assert torch.equal(dt[:, 0], F.softplus(projected.float() + state_space.dt_bias)[..., 0])  # along rows
    assert k.dtype == v.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("block", ["modern", "lightning", "mamba", "rwkv"])
def test_blocks_compile_whole_and_agree(block):
    """Forward and backward pass, with the kept tokens of a route and with all tokens."""
    net = randomised(small_dit(block=block, num_prefix_tokens=2))
    compiled = torch.compile(net.blocks[0], fullgraph=True)
    for length in (10, 18):
        x, c = torch.randn(3, length, 32), torch.randn(3, 1, 32)
        positions = None if net.positions is None else net.positions[:, :length]
        weights, gradients = list(net.blocks[0].parameters()), []
        for run in (net.blocks[0], compiled):
            grads = torch.autograd.grad(run(x, c, positions).square().sum(), weights)
            gradients.append(torch.cat([grad.flatten() for grad in grads]))
        eager, graph = gradients
        assert (eager - graph).norm() < 1e-5 * eager.norm()
