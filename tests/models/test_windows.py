"""Ablations of the window: two separate sequences, and the corrected self logit."""

import math

import pytest
import torch

from models.rejoin import Fuse, Mask
from routing import Routing
from tests.networks import PAPER, small_batch, small_dit
from tests.runs import tiny_run


def case(by_token=False, **options):
    """A routed network in float64, a batch, and the noise that selects 8 of 16 tokens."""
    net = small_dit([PAPER], class_dropout_prob=0.0, **options).double().train()
    x, c_noise, labels = small_batch()
    c_noise = torch.randn(4, 16, dtype=torch.float64) if by_token else c_noise.double()
    noise = torch.rand(4, 16, generator=torch.Generator().manual_seed(1))
    return net, (x.double().requires_grad_(), c_noise, labels), noise


def by_hand(net, batch, noise, block=lambda block, *args: block(*args)):
    """Apply the network to each sample alone, and its window to each half alone."""
    x, c_noise, labels = batch
    outputs = []
    for n in range(len(x)):
        h = net.x_embedder(x[n : n + 1])
        h = h if net.pos_embed is None else h + net.pos_embed
        c = net.t_embedder(c_noise[n : n + 1]).view(1, -1, 32) + net.y_embedder(labels[n : n + 1])[:, None]
        c = c.expand(1, 16, 32)
        everything = torch.arange(16)

        def at(ids, c=c):
            return c[:, ids], None if net.positions is None else net.positions[:, ids]

        for layer in net.blocks[:2]:
            h = block(layer, h, *at(everything))
        halves = noise[n].argsort()
        window = h.clone()
        for ids in (halves[:8].sort().values, halves[8:].sort().values):
            part = h[:, ids]
            for layer in net.blocks[2:5]:
                part = block(layer, part, *at(ids))
            window = window.index_copy(1, ids, part)
        h = window
        for layer in net.blocks[5:]:
            h = block(layer, h, *at(everything))
        outputs.append(net._unpatchify(net.final_layer(h, c)))
    return torch.cat(outputs)


def gradients(net, output, x):
    """Gradients of a scalar with respect to the input and all weights."""
    scalar = (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum()
    return torch.autograd.grad(scalar, [x, *net.parameters()], allow_unused=True)


def assert_same(actual, expected, tolerance=1e-11):
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("block", ["dit", "sprint", "lightning"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_separate_halves_pass_the_window_alone(block, by_token, checkpointing):
    net, batch, noise = case(by_token, window="separate", block=block, gradient_checkpointing=checkpointing)
    output, expected = net(*batch, routing=Routing(noise=[noise])), by_hand(net, batch, noise)
    assert torch.allclose(output, expected, rtol=1e-11, atol=1e-11)
    assert_same(gradients(net, output, batch[0]), gradients(net, expected, batch[0]))


def test_unequal_parts_are_all_processed():
    """Of 16 tokens, 12 stay and 4 are the second sequence: each block sees both lengths."""
    net = small_dit([PAPER], window="separate").train()
    lengths = []
    for layer in net.blocks[2:5]:
        layer.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    net(*small_batch(), routing=Routing(0.25))
    assert lengths == [12, 4] * 3
    lengths.clear()
    net(*small_batch(), routing=Routing(0.01))
    assert lengths == [16] * 3, "no token bypasses"


@pytest.mark.slow
@pytest.mark.parametrize("ablation", ["model.window=separate", "model/block=self_logit"])
def test_unequal_parts_train_with_compiled_blocks(tmp_path, ablation):
    """Each length is compiled once; more would be an error."""
    options = (ablation, "model.routes.0.selection_ratio=0.25", "train.compile=true")
    tiny_run(tmp_path / "run", "model=tread", *options, "train.total_steps=2")
    assert (tmp_path / "run/checkpoints/step_00000002").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"window": "separate", "num_prefix_tokens": 2},
            r"num_prefix_tokens=2 must be 0, and model/conditioning not prefix, with model.window=sep",
        ),
        ({"block": "self_logit", "num_prefix_tokens": 2}, "or model/block=self_logit"),
        ({"window": "separate", "rejoin": Fuse}, "model.window=separate must have model/rejoin=bypass"),
        ({"window": "separate", "rejoin": Mask}, "model.window=separate must have model/rejoin=bypass"),
        ({"window": "none"}, "model.window=none must be"),
    ],
)
def test_options_without_support_in_windows_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small_dit([PAPER], **options)


def corrected(layer, x, c, positions):
    """A DiT block whose attention is written out, with the correction on the diagonal."""
    shift1, scale1, gate1, shift2, scale2, gate2 = layer.adaLN_modulation(c).chunk(6, dim=-1)
    h = layer.norm1(x) * (1 + scale1) + shift1
    length = h.shape[1]
    q, k, v = layer.attn.qkv(h).view(1, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT / math.sqrt(8)
    if length < 16:
        logits = logits + math.log((length - 1) / 15) * torch.eye(length, dtype=h.dtype)
    h = (logits.softmax(dim=-1) @ v).transpose(1, 2).reshape(1, length, 32)
    x = x + gate1 * layer.attn.proj(h)
    return x + gate2 * layer.mlp(layer.norm2(x) * (1 + scale2) + shift2)


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_self_logit_block_matches_its_equation(attention, checkpointing):
    options = {"block": "self_logit", "window": "separate", "attention": attention}
    net, batch, noise = case(gradient_checkpointing=checkpointing, **options)
    output = net(*batch, routing=Routing(noise=[noise]))
    expected = by_hand(net, batch, noise, corrected)
    tolerance = 1e-11 if attention == "sdpa" else 1e-5  # the softmax of explicit attention is fp32
    assert torch.allclose(output, expected, rtol=tolerance, atol=tolerance)
    assert_same(gradients(net, output, batch[0]), gradients(net, expected, batch[0]), tolerance)
    for layer in net.blocks:
        layer.attn.full_length = None  # no correction
    assert not torch.allclose(output, by_hand(net, batch, noise), rtol=1e-3, atol=1e-3)


def test_the_correction_keeps_the_mean_weight_of_a_token_for_itself():
    """With equal logits, a token weighs itself one of N, however many are in the sequence."""
    layer = small_dit(block="self_logit").blocks[0].attn
    for length in (2, 8, 16):
        bias = layer._bias(length, torch.zeros(1))
        logits = torch.zeros(length, length) if bias is None else bias
        assert torch.allclose(logits.softmax(dim=-1).diagonal(), torch.tensor(1 / 16)), length
    assert layer._bias(1, torch.zeros(1)) is None, "a single token sees only itself"


@pytest.mark.parametrize("options", [{"window": "separate"}, {"block": "self_logit"}], ids=str)
def test_both_ablations_compile_and_are_dense_in_eval_mode(options):
    net, batch, noise = case(**options)
    plain = small_dit(class_dropout_prob=0.0).double()
    assert torch.equal(net.eval()(*batch), plain.eval()(*batch))
    expected = net.train()(*batch, routing=Routing(noise=[noise]))
    for layer in net.blocks:
        layer.compile(fullgraph=True, backend="aot_eager")
    output = net(*batch, routing=Routing(noise=[noise]))
    assert torch.allclose(output, expected, rtol=1e-9, atol=1e-9)
