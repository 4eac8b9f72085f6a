"""Routes in the network, for every kind of block: what is gathered, what is not, and no host syncs."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import apply_rot_embed_cat
from torch._subclasses.fake_tensor import FakeTensorMode

from builders.kept_tokens import KeptTokensLoss
from diffusion import EDMLoss, EDMPrecond
from models import DiT, token_mask
from models.rejoin import Bypass, Fuse, Mask
from routing import Adapter, BlockList, Route, Routing, attach, detach, with_prefix
from routing.routers import grid_router, norm_router, random_router
from tests.networks import PAPER, seeded, small_batch, small_dit

BLOCKS = ("dit", "modern")
PREFIXES = [("dit", 0), ("dit", 3), ("sprint", 3), ("modern", 3), ("lightning", 0), ("mamba", 3), ("rwkv", 3)]
VARIANTS = [{"block": block, "num_prefix_tokens": P} for block, P in PREFIXES]
# Adapter of a DiT that was built without routes.
BY_TOKEN = {"positions": lambda positions, kept: kept.gather_joint(positions)}
BY_TOKEN["c"] = lambda c, kept: c if c.shape[1] == 1 else kept.gather_joint(c)
ADAPTER = Adapter(
    BlockList("blocks", tokens="x", joint=True, by_token=BY_TOKEN),
    accepts=("x", "c_noise", "class_labels", "routing", "generator"),
    num_prefix_tokens=lambda net, arguments: net.num_prefix_tokens,
)
ROUTERS = (random_router, partial(norm_router, weight=0.5), norm_router, grid_router)
REJOINS = {"bypass": Bypass, "fuse": partial(Fuse, path_drop_prob=0.0), "mask": Mask}
FUSED = {"router": grid_router, "rejoin": Fuse}
OPTIONS = [{}, {"router": ROUTERS[1]}, FUSED, {"rejoin": Mask}]
OPTIONS += [{"window": "context"}, {"window": "separate"}, {"gradient_checkpointing": True}]
TWO_ROUTES = (Route(0.5, 1, 3), Route(0.3, 4, -2))
# Up to 0.85: a single kept token attends to itself alone, and queries and keys rightly get no gradient.
RATIOS, LAYERS = st.decimals("0.07", "0.85", places=2).map(float), st.integers(0, 7)
WINDOWS = st.lists(st.tuples(RATIOS, LAYERS), min_size=1, max_size=4)


def random_masks(seed=0):
    return torch.rand(4, 16, generator=seeded(seed)) < 0.3


def routes_from(windows):
    """Non-overlapping routes from arbitrary ratios and layers of a network of 8."""
    layers = sorted({layer for _, layer in windows})
    bounds = zip(layers, [*(layer - 1 for layer in layers[1:]), 7], strict=True)
    return [Route(ratio, *ends) for (ratio, _), ends in zip(windows, bounds, strict=False)]


def window_of(net, batch, **arguments):
    """Run the network. Return its output and, for its first window, ids_keep, the sequence before it, and the
    inputs of its blocks and of the block after it.
    """
    route, inputs, before = net.routes[0], [], []
    hooks = [
        net.blocks[idx].register_forward_pre_hook(lambda _, args: inputs.append(args))
        for idx in range(route.start_layer_idx, route.end_layer_idx + 2)
    ]
    ids, router, P = [], net.router, net.num_prefix_tokens
    net.router = lambda *args, **kwargs: ids.append(router(*args, **kwargs)) or ids[-1]
    whole = net.blocks[route.start_layer_idx - 1].register_forward_hook(lambda _, args, x: before.append(x))
    output = net(*batch, **arguments)
    net.router = router
    for hook in (*hooks, whole):
        hook.remove()
    return output, with_prefix(ids[0], P), before[0], inputs


def rejoined(net, h, ids, window):
    """Rejoin as models/rejoin/ defines it, for a sample (1, L, D) whose tokens `ids` were routed."""
    rejoin = net.rejoins[0]
    if isinstance(rejoin, Fuse):
        padded = rejoin.mask_token.expand_as(h).index_copy(1, ids, window)
        return rejoin.proj(torch.cat([h, padded], dim=-1))
    if isinstance(rejoin, Mask):
        h = torch.zeros_like(h)
        if net.pos_embed is not None:
            h[:, net.num_prefix_tokens :] = net.pos_embed
        h = h + rejoin.mask_token
    return h.index_copy(1, ids, window)


@pytest.mark.parametrize(
    ("rejoin", "by_token"), [(Bypass, True), *((rejoin, False) for rejoin in REJOINS.values())]
)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_routed_blocks_see_each_sample_s_own_tokens(variant, rejoin, by_token):
    """The window applied by hand to each sample alone gives the result of the batch, also if each token has
    its own noise level.
    """
    net = small_dit([PAPER], class_dropout_prob=0.0, rejoin=rejoin, **variant).train()
    (x, c_noise, labels), P, positions = small_batch(), net.num_prefix_tokens, net.positions
    c_noise, noise = torch.randn(4, P + 16) if by_token else c_noise, torch.rand(4, 16)
    output = net(x, c_noise, labels, routing=Routing(noise=[noise]))
    for n, ids in enumerate(noise.argsort(dim=1)[:, :8].sort(dim=1).values):
        ids, sample = torch.cat([torch.arange(P), P + ids]), slice(n, n + 1)
        h = net.x_embedder(x[sample])
        h = h if net.pos_embed is None else h + net.pos_embed
        h = torch.cat([net.prefix, h], dim=1) if P else h
        c = net.t_embedder(c_noise[sample]).view(1, -1, 32) + net.y_embedder(labels[sample]).unsqueeze(1)
        for block in net.blocks[:2]:
            h = block(h, c, positions)
        window, c_window = h[:, ids], c[:, ids] if by_token else c
        for block in net.blocks[2:5]:
            window = block(window, c_window, None if positions is None else positions[:, ids])
        h = rejoined(net, h, ids, window)
        for block in net.blocks[5:]:
            h = block(h, c, positions)
        by_hand = net._unpatchify(net.final_layer(h[:, P:], c[:, P:] if by_token else c))
        torch.testing.assert_close(output[sample], by_hand, atol=1e-4, rtol=1e-4)


def test_modern_block_is_what_its_name_says():
    """By hand: RMSNorm, QK-norm, rotation of channel pairs as complex numbers, softmax, SwiGLU."""
    net = small_dit(block="modern")
    block, x, c = net.blocks[0], torch.randn(2, 16, 32), torch.randn(2, 1, 32)
    torch.nn.init.uniform_(block.attn.q_norm.weight, 0.5, 2.0)

    def rms(z):
        return z / (z.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()

    def rotated(z):
        sin, cos = net.positions.chunk(2, dim=-1)
        turns = torch.complex(cos[..., ::2], sin[..., ::2])  # each pair of channels turns by one angle
        return torch.view_as_real(
            torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous()) * turns.unsqueeze(1)
        ).flatten(-2)

    shift1, scale1, gate1, shift2, scale2, gate2 = block.adaLN_modulation(c).chunk(6, dim=-1)
    qkv = block.attn.qkv(rms(x) * (1 + scale1) + shift1).view(2, 16, 3, 4, 8)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    q, k = rotated(rms(q) * block.attn.q_norm.weight), rotated(rms(k) * block.attn.k_norm.weight)
    attended = ((q @ k.mT) / 8**0.5).softmax(dim=-1) @ v
    h = x + gate1 * block.attn.proj(attended.transpose(1, 2).flatten(2))
    inner = rms(h) * (1 + scale2) + shift2
    gated = torch.nn.functional.silu(block.mlp.fc1_g(inner)) * block.mlp.fc1_x(inner)
    expected = h + gate2 * block.mlp.fc2(gated)
    torch.testing.assert_close(block(x, c, net.positions), expected, atol=1e-5, rtol=1e-5)


def test_queries_and_keys_are_normalised_and_turned_in_fp32():
    net, dtypes, turn = small_dit(block="modern"), [], apply_rot_embed_cat

    def seen(z, rope):
        dtypes.append(z.dtype)
        return turn(z, rope)

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr("models.layers.apply_rot_embed_cat", seen)
        net.blocks[0].attn.q_norm.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
        net.blocks[0](torch.randn(2, 16, 32), torch.randn(2, 1, 32), net.positions)
    assert dtypes == [torch.float32] * 3


def test_prefix_tokens_come_first_and_have_no_position():
    """Neither from the table nor by rotation."""
    dit, modern = (small_dit(block=block, num_prefix_tokens=3) for block in BLOCKS)
    x, z = small_batch()[0], torch.randn(4, 19, 8)
    assert torch.equal(dit._embed(x)[:, :3], dit.prefix.expand(4, -1, -1))
    turned = apply_rot_embed_cat(z, modern.positions)
    assert torch.equal(turned[:, :3], z[:, :3])
    assert torch.equal(turned[:, 3:], apply_rot_embed_cat(z[:, 3:], small_dit(block="modern").positions))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=10, deadline=None)
@given(windows=WINDOWS, seed=st.integers(0, 2**32))
def test_identity_blocks_leave_every_token_in_its_place(variant, windows, seed):
    net = small_dit(routes_from(windows), **variant).train()
    embedded = net._embed(small_batch()[0])
    for block in net.blocks:
        block.forward = lambda x, c, rope=None: x
    final = []
    net.final_layer.register_forward_pre_hook(lambda _, args: final.append(args[0]))
    net(*small_batch(), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(final[0], embedded[:, net.num_prefix_tokens :])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=10, deadline=None)
@given(windows=WINDOWS)
def test_ratio_zero_is_bitwise_dense_for_any_routes(variant, windows):
    dense, routed = small_dit(**variant).train(), small_dit(routes_from(windows), **variant).train()
    outputs = [
        net(*small_batch(), routing=r, generator=torch.Generator().manual_seed(0))
        for net, r in ((dense, None), (routed, Routing([0.0] * len(routed.routes))))
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("window", ["bypass", "context"])
@settings(max_examples=10, deadline=None)
@given(windows=WINDOWS, seed=st.integers(0, 2**32), router=st.sampled_from(ROUTERS))
def test_gradient_reaches_every_token_and_parameter(variant, window, windows, seed, router):
    net = small_dit(routes_from(windows), window=window, router=router, **variant).train()
    x, c_noise, labels = small_batch()
    x.requires_grad_()
    routing = Routing(force_keep=random_masks(seed))
    net(x, c_noise, labels, routing=routing, generator=seeded(seed)).square().sum().backward()
    assert (x.grad.abs().amax(dim=1) > 0).all()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in net.parameters())


@pytest.mark.parametrize("block", BLOCKS)
def test_the_norm_router_keeps_the_tokens_of_the_largest_norm(block):
    net = small_dit([PAPER], router=norm_router, block=block, num_prefix_tokens=2).train()
    _, ids_keep, x, _ = window_of(net, small_batch())
    norms = x[:, 2:].abs().sum(dim=-1)
    assert torch.equal(ids_keep[:, 2:] - 2, norms.topk(8, dim=1).indices.sort(dim=1).values)


def test_forced_tokens_stay_and_a_full_mask_does_not_change_the_others():
    net = small_dit([PAPER], class_dropout_prob=0.0).train()
    force_keep = torch.zeros(4, 16, dtype=torch.bool)
    force_keep[0] = True
    force_keep[1, [0, 5, 15]] = True
    routing = Routing(force_keep=force_keep)
    output, ids_keep, *_ = window_of(net, small_batch(), routing=routing, generator=seeded())
    plain, plain_ids, *_ = window_of(net, small_batch(), generator=seeded())
    assert {0, 5, 15} <= set(ids_keep[1].tolist())
    assert torch.equal(ids_keep[0], plain_ids[0])  # if all are forced, the draw decides as without
    assert torch.equal(ids_keep[2:], plain_ids[2:])
    assert torch.equal(output[2:], plain[2:])


def test_without_removal_the_window_sees_all_tokens():
    net = small_dit([PAPER], window="context").train()
    _, ids_keep, before, (*window, (after, c, _)) = window_of(net, small_batch())
    assert [args[0].shape[1] for args in window] == [16, 16, 16]
    dense = before
    for block in net.blocks[2:5]:
        dense = block(dense, c)
    kept = torch.zeros(4, 16, dtype=torch.bool).scatter(1, ids_keep, True)
    assert torch.equal(after[~kept], before[~kept])
    assert torch.equal(after[kept], dense[kept])
    assert not torch.equal(before, dense)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("by_token", "checkpointing"), [(False, False), (True, False), (False, True)])
def test_attached_routes_equal_the_network_s_routes(variant, by_token, checkpointing):
    """The DiT's loop and `attach` give the same outputs and gradients, with class dropout."""
    options = {"class_dropout_prob": 0.5, "gradient_checkpointing": checkpointing, **variant}
    routed, dense = small_dit(TWO_ROUTES, **options).train(), small_dit(**options).train()
    attach(dense, TWO_ROUTES, adapter=ADAPTER)
    x, c_noise, labels = small_batch()
    if by_token:
        c_noise = torch.randn(4, 16 + routed.num_prefix_tokens)
    routing = Routing(noise=[torch.rand(4, 16) for _ in TWO_ROUTES])
    # The network draws the dropped classes and takes tokens from the noise. `attach` first draws one seed per
    # route, which is not used here.
    ahead = torch.Generator().manual_seed(0)
    torch.randint(2**63 - 1, (2,), generator=ahead)
    draws = {routed: ahead, dense: torch.Generator().manual_seed(0)}
    results = []
    for net, generator in draws.items():
        output = net(x, c_noise, labels, routing=routing, generator=generator)
        output.square().sum().backward()
        results.append([output, *(parameter.grad for parameter in net.parameters())])
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(*results)  # gradients of gathered tensors are summed in another order
    unlike = dense(x, c_noise, labels, routing=Routing(0), generator=torch.Generator().manual_seed(0))
    assert not torch.equal(results[1][0], unlike)
    with pytest.raises(ValueError, match="DiT was built with routes: build it without"):
        attach(routed, TWO_ROUTES, adapter=ADAPTER)
    detach(dense)
    assert torch.equal(dense.eval()(x, c_noise, labels), routed.eval()(x, c_noise, labels))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("precision", "route_options"),
    [(torch.float32, {"router": ROUTERS[1]}), (torch.bfloat16, FUSED), (torch.bfloat16, {"rejoin": Mask})],
    ids=["bypass", "fuse", "mask"],
)
def test_gradient_checkpointing_changes_no_gradient(variant, precision, route_options):
    gradients = []
    for gradient_checkpointing in (False, True):
        options = {**route_options, "fp32_after_route": True, **variant}
        net = small_dit(TWO_ROUTES, gradient_checkpointing=gradient_checkpointing, **options).train()
        calls = []
        net.blocks[2].register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args[0].shape[1]))
        batch, generator = small_batch(), torch.Generator().manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            output = net(*batch, routing=Routing(force_keep=random_masks()), generator=generator)
        output.square().sum().backward()
        assert len(calls) == 1 + gradient_checkpointing
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("options", [FUSED, *OPTIONS[-2:]], ids=["fuse", "separate", "checkpointing"])
def test_a_backward_pass_reads_no_value(options):
    """Fake tensors have no values, so reading one fails."""
    with FakeTensorMode():
        net = DiT(8, 2, 3, 32, 8, 4, num_classes=10, routes=TWO_ROUTES, **options).train()
        x, labels = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)
        routing = Routing(0.5, force_keep=torch.zeros(4, 16).bool())
        loss_fn = KeptTokensLoss(EDMLoss(), net, 0.1)
        loss_fn(EDMPrecond(net), x, labels, routing=routing, mask=torch.rand(4, 8, 8)).mean().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_nothing_waits_for_the_gpu(variant, options):
    net = small_dit(TWO_ROUTES, **variant, **options).cuda().train()
    x, labels = torch.randn(4, 3, 8, 8, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    arguments = {
        "routing": Routing(0.5, force_keep=torch.rand(4, 16, device="cuda") < 0.3),
        "mask": torch.rand(4, 8, 8, device="cuda"),
    }
    generator = torch.Generator("cuda").manual_seed(0)
    loss_fn = KeptTokensLoss(EDMLoss(), net, 0.1)
    loss_fn(EDMPrecond(net), x, labels, generator=generator, **arguments).mean().backward()  # warm up
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_fn(EDMPrecond(net), x, labels, generator=generator, **arguments).mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"block": "modern"}, FUSED], ids=["dit", "modern", "fused"])
def test_residual_stream_is_fp32_under_autocast(options):
    net, dtypes = small_dit([PAPER], **options).train(), []
    for module in net.blocks:
        module.register_forward_hook(lambda _, args, output: dtypes.extend((args[0].dtype, output.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        net(*small_batch())
    assert set(dtypes) == {torch.float32}


def test_a_token_is_touched_where_its_patch_is():
    mask = torch.zeros(2, 8, 8)
    mask[0, 1, 6], mask[1, 4:6, :2] = 0.01, 1
    touched = token_mask(mask, patch_size=2)
    assert touched.shape == (2, 16) and touched.nonzero().tolist() == [[0, 3], [1, 8]]


def test_a_mask_forces_tokens_that_it_covers_by_more_than_the_area():
    """The mask covers a half, a quarter and the whole of the first three patches."""
    mask = torch.zeros(1, 8, 8)
    mask[0, 0, :2] = mask[0, 0, 2] = mask[0, :2, 4:6] = 1
    for area, forced in ((0.0, [0, 1, 2]), (0.25, [0, 2]), (0.5, [2]), (0.75, [2])):
        assert token_mask(mask, 2, area)[0].nonzero().flatten().tolist() == forced
