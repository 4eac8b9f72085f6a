"""The wide head after the blocks, against a transcription of its equations."""

import pytest
import torch
import torch.nn.functional as F

from models import DiT
from models.blocks import DiTBlock, LightningBlock
from models.layers import modulate
from routing import Route, Routing

HEAD = {"head_width": 48, "head_depth": 2, "head_num_heads": 4}


def network(block=DiTBlock, **options):
    torch.manual_seed(0)
    options = {"num_classes": 5, "class_dropout_prob": 0.0, "block": block, **HEAD, **options}
    net = DiT(8, 2, 3, 32, 5, 4, **options)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return net.eval()


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("block", [DiTBlock, LightningBlock])
@torch.no_grad()
def test_tokens_are_modulated_by_the_output_of_the_blocks(block, prefix):
    net, x = network(block, num_prefix_tokens=prefix), torch.randn(2, 3, 8, 8)
    c_noise, labels = torch.randn(2), torch.tensor([1, 2])
    seen = []
    net.blocks[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    F_x = net(x, c_noise, labels)
    s, t = seen[0][:, prefix:], net.t_embedder(c_noise)[:, None]
    head = net.head
    c = F.silu(t + s) @ head.projector.weight.T + head.projector.bias
    patches = x.view(2, 3, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 16, 12)
    tokens = patches @ head.x_embedder.proj.weight.view(48, 12).T + head.x_embedder.proj.bias
    tokens = tokens + head.pos_embed
    for layer in head.blocks:
        tokens = layer(tokens, c, head.positions)
    shift, scale = net.final_layer.adaLN_modulation(c).chunk(2, dim=-1)
    out = net.final_layer.linear(modulate(net.final_layer.norm_final(tokens), shift, scale))
    expected = out.view(2, 4, 4, 2, 2, 3).permute(0, 5, 1, 3, 2, 4).reshape(2, 3, 8, 8)
    torch.testing.assert_close(F_x, expected, rtol=1e-4, atol=1e-5)


def test_it_starts_at_zero_and_learns_with_routes():
    torch.manual_seed(0)
    net = DiT(8, 2, 3, 32, 5, 4, num_classes=5, routes=(Route(0.5, 1, 3),), **HEAD).train()
    x, labels = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    assert not net(x, torch.zeros(2), labels).any()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    net(x, torch.zeros(2), labels, routing=Routing(0.5)).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


def test_its_cost_counts_a_modulation_for_each_token():
    with torch.device("meta"):
        plain, wide = network(head_width=None), network()
    T, D, W = 16, 32, 48
    embed = T * 2 * (12 * W + D * W)
    block = T * 2 * (3 * W * W + W * W + 2 * 4 * W * W) + 4 * T * T * W + T * 2 * 6 * W * W
    final = T * 2 * (12 * W + 2 * W * W) - (T * 2 * 12 * D + 2 * 2 * D * D)
    assert wide.flops(()).forward - plain.flops(()).forward == embed + 2 * block + final


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_width": 50}, "model.head_width=50 must be a multiple of model.head_num_heads=4, or null"),
        ({"head_width": 48, "head_depth": 0}, "model.head_depth=0 must be greater than 0"),
    ],
)
def test_wrong_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        network(**options)
