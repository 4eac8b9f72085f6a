"""Networks with captions against a transcription that leaves padding out."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import DiT, TextShape
from routing import Route, Routing
from tests.networks import seeded, small_batch, small_dit

IDS, EMBEDDINGS = TextShape(5, vocab_size=9), TextShape(5, num_features=12)
LENGTHS = (3, 0, 5, 1)  # tokens of each caption
S, K, ROUTE = 6, 8, Route(0.5, 2, 4)
BOTH = pytest.mark.parametrize("conditioning", ["prefix", "cross"])


def text_net(conditioning, text=IDS, routes=(ROUTE,), **arguments):
    net = small_dit(routes, num_classes=0, conditioning=conditioning, text=text, **arguments)
    return net.eval()


def captions(text=IDS):
    if text.num_features is None:
        rows = torch.randint(1, text.vocab_size + 1, (4, text.num_tokens), generator=seeded(1))
    else:
        rows = torch.randn(4, text.num_tokens, text.num_features, generator=seeded(1))
    for row, length in zip(rows, LENGTHS, strict=True):
        row[length:] = 0
    return rows


def transcribed(net, x, c_noise, text, length):
    """F_x of one sample, with the `length` tokens of its caption alone, written from the equations."""
    embedder = net.text_embedder
    words = embedder.embed(text[:, :length]) + embedder.positions[:, :length]
    words = torch.cat([embedder.first, words], dim=1)  # (1, 1 + length, D)
    x = net.x_embedder(x) + net.pos_embed
    c = net.t_embedder(c_noise)[:, None]
    c = c + words.mean(1, keepdim=True) if net.pool_text else c
    x = torch.cat([words, x], dim=1) if net.text_is_prefix else x
    for block in net.blocks:
        shift1, scale1, gate1, shift2, scale2, gate2 = block.adaLN_modulation(c).chunk(6, dim=-1)
        x = x + gate1 * block.attn(block.norm1(x) * (1 + scale1) + shift1)
        if not net.text_is_prefix:
            x = x + of_torch(block.cross, x, words)
        x = x + gate2 * block.mlp(block.norm2(x) * (1 + scale2) + shift2)
    x = x[:, words.shape[1] :] if net.text_is_prefix else x
    return net._unpatchify(net.final_layer(x, c))


def of_torch(cross, x, words):
    """The cross-attention by torch's own module."""
    D = x.shape[-1]
    query = F.layer_norm(x, (D,), eps=1e-6)
    weight, bias = torch.cat([cross.q.weight, cross.kv.weight]), torch.cat([cross.q.bias, cross.kv.bias])
    arguments = (query.transpose(0, 1), *[words.transpose(0, 1)] * 2, D, cross.num_heads, weight, bias)
    output, _ = F.multi_head_attention_forward(
        *arguments, None, None, False, 0.0, cross.proj.weight, cross.proj.bias, need_weights=False
    )
    return output.transpose(0, 1)


@BOTH
@pytest.mark.parametrize("text", [IDS, EMBEDDINGS], ids=["ids", "embeddings"])
@pytest.mark.parametrize(("attention", "pool_text"), [("sdpa", False), ("explicit", False), ("sdpa", True)])
@torch.no_grad()
def test_padding_has_no_effect(conditioning, text, attention, pool_text):
    net = text_net(conditioning, text, attention=attention, pool_text=pool_text)
    (x, c_noise, _), rows = small_batch(), captions(text)
    F_x = net(x, c_noise, rows)
    for i, length in enumerate(LENGTHS):
        expected = transcribed(net, x[i : i + 1], c_noise[i : i + 1], rows[i : i + 1], length)
        torch.testing.assert_close(F_x[i : i + 1], expected, rtol=1e-4, atol=1e-5)


@BOTH
def test_text_never_bypasses(conditioning):
    net, (x, c_noise, _), inputs = text_net(conditioning), small_batch(), []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments))
    noise = [torch.rand(4, 16, generator=torch.Generator().manual_seed(0))]
    net(x, c_noise, captions(), routing=Routing(0.5, noise=noise))
    lengths = [arguments[0].shape[1] for arguments in inputs]
    in_front = S if conditioning == "prefix" else 0
    assert lengths == [in_front + (K if 2 <= i <= 4 else 16) for i in range(8)]
    tokens, bias = net.text_embedder(captions())
    assert torch.equal(inputs[0][0][:, :S], tokens) == (conditioning == "prefix")
    for arguments in inputs:
        given = arguments[3:]
        assert torch.equal(given[0], bias) and (len(given) == 1 or torch.equal(given[1], tokens))


@BOTH
def test_captions_are_dropped_for_guidance(conditioning):
    net = text_net(conditioning, routes=(), class_dropout_prob=0.5)
    (x, c_noise, _), rows = small_batch(), captions()
    empty = net.null_labels(4)
    assert empty.shape == rows.shape and empty.dtype == rows.dtype and not empty.any()
    net.train()
    kept = torch.rand(4, generator=torch.Generator().manual_seed(0)) >= 0.5
    assert kept.any() and not kept.all()
    F_x = net(x, c_noise, rows, generator=torch.Generator().manual_seed(0))
    expected = net.eval()(x, c_noise, torch.where(kept[:, None], rows, empty))
    torch.testing.assert_close(F_x, expected)


@BOTH
@pytest.mark.parametrize("text", [IDS, EMBEDDINGS], ids=["ids", "embeddings"])
def test_flops_are_those_that_torch_counts(conditioning, text):
    net, (x, c_noise, _) = text_net(conditioning, text).train(), small_batch(2)
    for ratio, kept in ((0.0, 16), (0.5, K)):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            net(x, c_noise, captions(text)[:2], routing=Routing(ratio)).sum().backward()
        assert counter.get_total_flops() == 2 * net.flops([kept]).training


def test_cross_attention_starts_as_zero_and_learns():
    torch.manual_seed(0)
    net = DiT(8, 2, 3, 32, 2, 4, num_classes=0, conditioning="cross", text=IDS)
    assert not any(block.cross.proj.weight.any() for block in net.blocks)
    with torch.no_grad():
        net.final_layer.linear.weight.normal_(std=0.1)
        for block in net.blocks:
            block.adaLN_modulation[1].weight.normal_(std=0.1)
    x, c_noise, _ = small_batch()
    net(x, c_noise, captions()).square().sum().backward()
    assert all(block.cross.proj.weight.grad.any() for block in net.blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conditioning": "prefix", "text": None}, "model/conditioning=prefix needs data with captions"),
        ({"conditioning": "prefix", "block": "mamba"}, "needs a block with attention"),
        ({"conditioning": "prefix", "block": "self_logit"}, "model/conditioning not prefix"),
        (
            {"conditioning": "prefix", "window": "separate", "routes": (ROUTE,)},
            "model/conditioning not prefix",
        ),
        ({"conditioning": "token"}, "model.conditioning=token must be one of class, prefix, cross"),
    ],
    ids=str,
)
def test_unsupported_conditioning_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        small_dit(**{"text": IDS, "num_classes": 0, **change})


def test_a_text_shape_has_a_vocabulary_or_features():
    for sizes in ({}, {"vocab_size": 3, "num_features": 3}):
        with pytest.raises(ValueError, match="either vocab_size or num_features"):
            TextShape(4, **sizes)
    with pytest.raises(ValueError, match=r"model.text.num_tokens=0 must be"):
        TextShape(0, vocab_size=3)


@pytest.mark.parametrize("block", ["mamba", "rwkv", "modern", "self_logit"])
@torch.no_grad()
def test_cross_attention_works_in_every_block(block):
    net, (x, c_noise, _), rows = text_net("cross", block=block), small_batch(), captions()
    assert (net(x, c_noise, rows) - net(x, c_noise, torch.zeros_like(rows))).abs().max() > 1e-4
