"""Guidance over the predictions of a small network with a route."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from diffusion import EDMPrecond, FlowPath, FlowPrecond, edm_sampler, generate
from diffusion.generate import cost_of_evaluations, count_evaluations, expected_times
from diffusion.guidance import CFG, AutoGuidance, Branch, InternalGuidance, PathDropGuidance, SparseGuidance
from diffusion.guidance.guidance import predict
from models.rejoin import Fuse, Mask
from routing import Routing, grid_router
from tests.networks import BLOCKS, PAPER, small_batch, small_dit

NET = small_dit([PAPER]).eval()
PRECOND = EDMPrecond(NET)
X, _, LABELS = small_batch()
T = torch.tensor(1.3, dtype=torch.float64)
NULL = torch.full_like(LABELS, NET.num_classes)
DENSE = EDMPrecond(small_dit()).eval()
OTHER = EDMPrecond(small_dit([PAPER], depth=6)).eval()
UNCONDITIONAL = EDMPrecond(small_dit([PAPER], num_classes=0)).eval()
UNTRAINED = Branch(EDMPrecond(small_dit([PAPER], class_dropout_prob=0.0)).eval(), LABELS)


def strong(**more):
    return Branch(PRECOND, LABELS, **more)


def rand(num, seed=0):
    return torch.rand(len(LABELS), num, generator=torch.Generator().manual_seed(seed))


def weaker_by(weak, guidance=None):
    guidance = guidance or AutoGuidance(2.0, weak_run="weak", null_class=True)
    guidance.load(lambda run, checkpoint: weak)
    return guidance


def D(labels, routing=None, precond=PRECOND):
    return precond(X, T, labels, routing=routing)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def draw(i, ratio):
    """The routing of the i-th of two draws of tokens."""
    return Routing(ratio, noise=[rand(2 * NET.num_tokens).split(NET.num_tokens, dim=1)[i]])


@pytest.mark.parametrize(
    "guidance, strong_routing, weak",
    [
        (CFG(2.0), None, lambda: D(NULL)),
        (AutoGuidance(2.0, weak_run="other", weak_checkpoint="5"), None, lambda: D(LABELS, precond=OTHER)),
        (AutoGuidance(2.0, weak_run="other", null_class=True), None, lambda: D(NULL, precond=OTHER)),
        (SparseGuidance(2.0, weak_run="other", null_class=True), None, lambda: D(NULL, draw(1, 0.75), OTHER)),
        # Public code drops the class in both branches. Here they differ in their tokens alone.
        (SparseGuidance(2.0, strong_ratio=0.25), draw(0, 0.25), lambda: D(LABELS, draw(1, 0.75))),
        (PathDropGuidance(2.0), None, lambda: D(NULL, Routing(1))),
    ],
)  # fmt: skip
def test_guidance_steps_from_its_weak_branch_past_the_strong_one(guidance, strong_routing, weak):
    opened = []
    guidance.load(lambda *source: opened.append(source) or OTHER)
    D_s, D_w = D(LABELS, strong_routing), weak()
    torch.testing.assert_close(guidance(strong(rand=rand))(X, T), D_w + 2 * (D_s - D_w))
    assert opened == ([("other", guidance.weak_checkpoint)] if getattr(guidance, "weak_run", None) else [])


@pytest.mark.parametrize(
    "guidance",
    [CFG(1.0), AutoGuidance(1.0, weak_run="other"), SparseGuidance(1.0), PathDropGuidance(1.0)],
    ids=lambda g: type(g).__name__,
)
def test_scale_one_is_conditional_at_the_cost_of_one(guidance):
    guidance.load(lambda run, checkpoint: OTHER)
    assert torch.equal(guidance(strong())(X, T), D(LABELS))
    assert count_evaluations(PRECOND, guidance, [T]).total() == 1


@pytest.mark.parametrize(
    "options",
    [*({"block": kind} for kind in BLOCKS), {"router": grid_router, "rejoin": Fuse}, {"rejoin": Mask}],
    ids=[*BLOCKS, "fuse", "mask"],
)
@pytest.mark.parametrize("guidance", [SparseGuidance(2.0), PathDropGuidance(2.0)], ids=["sparse", "drop"])
def test_every_backbone_is_guided_and_an_image_is_the_same_alone(options, guidance):
    """Networks have a prefix, if their block allows one. Guidance changes the image."""
    prefix = 0 if options.get("block") == "self_logit" else 2
    precond = EDMPrecond(small_dit([PAPER], num_prefix_tokens=prefix, **options)).eval()
    noise = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def sample(guidance, ids):
        draws = [torch.Generator().manual_seed(i) for i in ids]
        rand = lambda num: torch.stack([torch.rand(num, generator=draw) for draw in draws])  # noqa: E731
        return edm_sampler(guidance(Branch(precond, LABELS[ids], rand=rand)), noise[ids], num_steps=3)

    guided = sample(guidance, range(4))
    assert guided.isfinite().all()
    torch.testing.assert_close(guided[2:3], sample(guidance, range(2, 3)), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(guided, sample(CFG(1.0), range(4)), atol=1e-2)


@pytest.mark.parametrize("routes", [(), [PAPER]], ids=["dense", "routed"])
def test_internal_guidance_steps_past_the_inner_prediction_in_one_forward(routes):
    """D = D_inner + w (D_F - D_inner)."""
    precond = EDMPrecond(small_dit(routes, inner_head=1)).eval()
    calls = []
    precond.net.register_forward_hook(lambda module, args, output: calls.append(output))
    guided = InternalGuidance(2.5)(Branch(precond, LABELS))(X, T)
    ((F_x, inner),) = calls
    D_s, D_i = (precond.denoised(F, X, T) for F in (F_x, inner))
    assert F_x.shape == inner.shape and not torch.allclose(D_s, D_i)
    torch.testing.assert_close(guided, D_i + 2.5 * (D_s - D_i))
    evaluations = count_evaluations(precond, InternalGuidance(2.5), [T])
    assert evaluations.total() == 1
    assert torch.equal(InternalGuidance(1.0)(Branch(precond, LABELS))(X, T), D_s)
    assert torch.equal(precond(X, T, LABELS), D_s), "other guidance and samplers do not see it"


def test_the_first_channels_alone_may_be_guided():
    guided, plain = CFG(3.0, num_channels=2)(strong())(X, T), CFG(3.0)(strong())(X, T)
    torch.testing.assert_close(guided[:, :2], plain[:, :2])
    torch.testing.assert_close(guided[:, 2:], D(LABELS)[:, 2:])


@pytest.mark.parametrize("level, inside", [(0.3, False), (0.31, True), (2.0, True), (2.01, False)])
@pytest.mark.parametrize("make_precond", [EDMPrecond, FlowPrecond])
def test_outside_its_interval_of_noise_levels_guidance_is_off(make_precond, level, inside):
    precond = make_precond(NET).eval()
    t = precond.path.time_at(torch.tensor(level, dtype=torch.float64))
    denoise = CFG(2.0, guidance_interval=[0.3, 2.0])(Branch(precond, LABELS))
    expected = CFG(2.0 if inside else 1.0)(Branch(precond, LABELS))(X, t)
    assert torch.equal(denoise(X, t), expected) and torch.equal(expected, precond(X, t, LABELS)) != inside


@pytest.mark.parametrize(
    "schedule, scales",
    [("linear", (1, 1.5, 2, 3)), ("cosine", (1, 1.2929, 2, 3)), ("constant", (3, 3, 3, 3))],
)
def test_a_schedule_rises_from_noise_to_data(schedule, scales):
    guidance, levels = CFG(3.0, schedule=schedule), torch.tensor([1e9, 3, 1, 1e-9], dtype=torch.float64)
    values = [guidance.scale(PRECOND.path, level) for level in levels]
    assert values == pytest.approx(scales, abs=1e-4)


@pytest.mark.parametrize("share_masks", [False, True])
@pytest.mark.parametrize("masks", ["fresh", "fixed"])
def test_masks_are_fresh_or_fixed_shared_or_not(masks, share_masks):
    """Fixed masks are equal in all evaluations of an image, shared ones in both branches of an evaluation."""
    guidance = SparseGuidance(2.0, strong_ratio=0.25, masks=masks, share_masks=share_masks)
    generator, branches, pairs = torch.Generator().manual_seed(0), guidance.branches, []
    guidance.branches = lambda *args: pairs.append(branches(*args)) or pairs[-1]
    denoise = guidance(strong(rand=lambda num: torch.rand(len(LABELS), num, generator=generator)))
    denoise(X, T)
    denoise(X, T)
    (strong_1, weak_1), (strong_2, weak_2) = ([b.routing.noise[0] for b in pair] for pair in pairs)
    assert torch.equal(strong_1, strong_2) == torch.equal(weak_1, weak_2) == (masks == "fixed")
    assert torch.equal(strong_1, weak_1) == share_masks


def test_path_drop_guidance_skips_the_window_and_needs_no_classes():
    assert count_evaluations(PRECOND, PathDropGuidance(2.0), [T]) == {(NET, (16,)): 1, (NET, (0,)): 1}
    guided = PathDropGuidance(2.0)(Branch(UNCONDITIONAL, None))(X, T)
    weak = D(None, Routing(1), UNCONDITIONAL)
    torch.testing.assert_close(guided, weak + 2 * (D(None, None, UNCONDITIONAL) - weak))


def test_a_ratio_that_keeps_all_tokens_is_dense():
    """Both branches keep all tokens and share one forward."""
    guidance = SparseGuidance(2.0, strong_ratio=0.01, weak_ratio=0)
    torch.testing.assert_close(guidance(strong(rand=rand))(X, T), D(LABELS))


def test_scheduled_ratios_take_few_values():
    guidance = SparseGuidance(2.0, strong_ratio=0.6, weak_ratio=0.6, ratio_schedule="cosine", num_levels=4)
    times = torch.linspace(1, 0, 101, dtype=torch.float64)  # t = 1 - share of the data, on this path
    ratios = [guidance.ratios(FlowPath(), t) for t in times]
    assert ratios[0] == (0, 0.6) and ratios[-1] == (0.6, 0)
    assert len(set(ratios)) == 4
    assert sorted(ratios) == ratios  # the strong ratio rises
    assert all(sum(pair) == pytest.approx(0.6) for pair in ratios)


def test_branches_of_one_network_and_length_share_a_forward():
    calls = []
    handle = NET.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    routing = [Routing(0.5, noise=[rand(NET.num_tokens, seed)]) for seed in (1, 2)]
    branches = [strong(), strong(routing=routing[0]), Branch(PRECOND, NULL), strong(routing=routing[1])]
    F_x = predict(branches, X, T)
    handle.remove()
    assert calls == [2 * len(LABELS)] * 2
    for branch, output in zip(branches, F_x, strict=True):
        expected = PRECOND.predict(X, T, branch.class_labels, routing=branch.routing)[0]
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_the_cost_of_an_image_counts_every_forward():
    def cost(guidance):
        sampler = partial(edm_sampler, num_steps=3)
        taken, images = [], []

        def counted(x, *arguments, **options):
            images.append(len(x))
            return forward(x, *arguments, **options)

        options = {"seeds": range(4), "class_labels": LABELS[:1].expand(4), "device": torch.device("cpu")}
        with mock.patch.object(NET, "forward", counted):
            generate(PRECOND, sampler, guidance, **options, times=taken)
        evaluated = cost_of_evaluations(count_evaluations(PRECOND, guidance, taken))
        assert sum(images) == 4 * evaluated["network_evaluations"]
        assert taken == expected_times(PRECOND, sampler)
        return evaluated

    forward = NET.forward
    T, dense = NET.num_tokens, NET.flops([NET.num_tokens]).forward
    assert cost(CFG(1.0)) == {"network_evaluations": 5, "flops": 5 * dense}
    assert cost(CFG(2.0)) == {"network_evaluations": 10, "flops": 10 * dense}
    half = NET.flops([T - T // 2]).forward
    assert cost(SparseGuidance(2.0, weak_ratio=0.5)) == {
        "network_evaluations": 10,
        "flops": 5 * dense + 5 * half,
    }
    # Outside of the interval one forward is enough. Of sigma = 80, 2.5, 0.002 one level is inside, twice.
    assert cost(CFG(2.0, guidance_interval=[1.0, 10.0]))["network_evaluations"] == 7


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: CFG(2.0, guidance_interval=[2.0, 1.0]), "guidance_interval=.* must be two noise levels"),
        (lambda: AutoGuidance(weak_checkpoint="5"), "guidance.weak_checkpoint=5 needs guidance.weak_run"),
        (lambda: SparseGuidance(2.0)(Branch(DENSE, LABELS)), "needs a network with routes"),
        (lambda: PathDropGuidance(2.0)(Branch(DENSE, LABELS)), "path_drop needs a network with routes"),
        (lambda: CFG(2.0)(Branch(UNCONDITIONAL, None)), "=2.0 must be 1 for an unconditional network"),
        # Weak networks of another path, or with other routes.
        (lambda: weaker_by(FlowPrecond(NET))(strong()), "its path, latent shape and condition .FlowPath"),
        (lambda: weaker_by(DENSE, SparseGuidance(2.0, weak_run="w"))(strong()), "run=w: it has 0 routes"),
        (lambda: AutoGuidance(2.0)(strong()), "guidance=auto needs guidance.weak_run, guidance.weak_c"),
        (lambda: SparseGuidance(2.0, masks="fixed")(strong()), "need Branch"),
        (lambda: InternalGuidance(2.0)(strong()), r"internal needs a network trained with model\.inner_head"),
        *((make, "for a network whose null class was not trained") for make in (
            lambda: CFG(2.0)(UNTRAINED),
            lambda: PathDropGuidance(2.0)(UNTRAINED),
            lambda: SparseGuidance(2.0, null_class=True)(UNTRAINED),
            lambda: AutoGuidance(2.0, null_class=True)(UNTRAINED),
            lambda: weaker_by(UNTRAINED.precond)(strong()),
        )),
    ],
)  # fmt: skip
def test_unsupported_guidance_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "guidance", [CFG(1.0), PathDropGuidance(1.0), SparseGuidance(2.0)], ids=lambda g: type(g).__name__
)
def test_guidance_without_the_null_class_does_not_need_one(guidance):
    if not isinstance(guidance, SparseGuidance):  # scale 1 also works for an unconditional network
        assert guidance(Branch(UNCONDITIONAL, None))(X, T).isfinite().all()
    assert guidance(replace(UNTRAINED, rand=rand))(X, T).isfinite().all()
    # Only the weak network is evaluated without a class.
    trained = weaker_by(PRECOND)(replace(UNTRAINED, rand=rand))
    assert trained(X, T).isfinite().all()
