import pytest
import torch

from models import DiT
from models.layers import GELU, attention, resolve_attention, sincos_position_table
from routing import Route, Routing
from tests.networks import PAPER, seeded, small_batch, small_dit


def test_position_table_is_the_public_one():
    # One entry computed by hand, row 1 and column 2 of a 4x4 grid with 8 channels. Columns come before rows,
    # sines before cosines.
    table = sincos_position_table(8, 4)
    angles = torch.tensor([1.0, 0.01])
    expected = torch.cat([(2 * angles).sin(), (2 * angles).cos(), angles.sin(), angles.cos()])
    torch.testing.assert_close(table[1 * 4 + 2], expected)


def test_norms_add_a_millionth_to_the_variance():
    """The tokens are small, so that it matters."""
    net, x = small_dit(), 1e-3 * torch.randn(2, 16, 32)
    expected = (x - x.mean(dim=-1, keepdim=True)) / (x.var(dim=-1, keepdim=True, correction=0) + 1e-6).sqrt()
    for norm in (net.blocks[0].norm1, net.blocks[0].norm2, net.final_layer.norm_final):
        torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("block", "mlp_ratio", "width"), [("dit", 4, 128), ("dit", 3, 96), ("modern", 4, 88), ("modern", 3, 64)]
)
def test_mlp_ratio_sets_the_width_of_the_mlp(block, mlp_ratio, width):
    """A gated MLP has two thirds of the width: 32 * 4 * 2 / 3 is 85.3, rounded up to 88, a multiple of 8."""
    assert small_dit(block=block, mlp_ratio=mlp_ratio).blocks[0].mlp.fc2.in_features == width


@pytest.mark.parametrize("init", ["adaln_zero", "xavier"])
def test_weights_start_as_published(init):
    """Linear layers and the patch projection: Xavier; embeddings: std 0.02; everything else: zero."""
    D, fans = 64, {"x_embedder.proj": (12, 64)}
    for i in range(2):
        fans |= {f"blocks.{i}.attn.qkv": (D, 3 * D), f"blocks.{i}.attn.proj": (D, D)}
        fans |= {f"blocks.{i}.mlp.fc1": (D, 4 * D), f"blocks.{i}.mlp.fc2": (4 * D, D)}
        fans |= {f"blocks.{i}.adaLN_modulation.1": (D, 6 * D)} if init == "xavier" else {}
    if init == "xavier":
        fans |= {"final_layer.adaLN_modulation.1": (D, 2 * D), "final_layer.linear": (D, 12)}
    expected = {f"{name}.weight": (2 / sum(fan)) ** 0.5 for name, fan in fans.items()}
    embeddings = ("t_embedder.mlp.0.weight", "t_embedder.mlp.2.weight")
    embeddings += ("y_embedder.embedding_table.weight", "prefix")
    net = DiT(8, 2, 3, D, 2, 4, num_classes=100, num_prefix_tokens=9, init=init)
    stds = {name: parameter.std().item() for name, parameter in net.named_parameters() if parameter.any()}
    assert stds == pytest.approx(expected | dict.fromkeys(embeddings, 0.02), rel=0.1)
    assert net(*small_batch()).any() == (init == "xavier")  # the zeros of adaLN-Zero make the output zero
    x = torch.randn(2, 25, D)
    assert torch.equal(net.blocks[0](x, torch.randn(2, 1, D)), x) == (init == "adaln_zero")


@pytest.mark.parametrize(("training", "prob"), [(True, 0.3), (True, 0.7), (False, 0.7)])
def test_labels_are_dropped_only_in_training_with_the_given_probability(training, prob):
    net, (*_, labels) = small_dit(class_dropout_prob=prob).train(training), small_batch(1000)
    used = net._labels(labels, seeded())
    dropped = used == 10
    assert torch.equal(used[~dropped], labels[~dropped])
    assert abs(dropped.float().mean() - training * prob) < 0.05


LATE = (Route(0.5, 0, 1), Route(0.25, 2, 3), Route(0.7, 6, -1))


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize(
    ("routes", "training", "ratio", "lengths"),
    [
        ([PAPER], True, None, [16, 16, 8, 8, 8, 16, 16, 16]),
        ([PAPER], False, None, [16] * 8),
        ([PAPER], False, 0.25, [16, 16, 12, 12, 12, 16, 16, 16]),
        ([PAPER], True, 0.9, [16, 16, 2, 2, 2, 16, 16, 16]),
        ([PAPER], True, 0, [16] * 8),
        (LATE, True, None, [8, 8, 12, 12, 16, 16, 5, 5]),
        (LATE, True, (0, 0.5, 0.25), [16, 16, 8, 8, 16, 16, 12, 12]),
    ],
)
def test_window_is_inclusive_at_both_ends_and_only_in_training(routes, training, ratio, lengths, prefix):
    """Several windows may touch and reach the last layer."""
    net, seen = small_dit(routes, num_prefix_tokens=prefix).train(training), []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    assert net(*small_batch(), routing=Routing(ratio)).shape == (4, 3, 8, 8)
    assert seen == [prefix + length for length in lengths]


def test_generator_draws_class_dropout_before_the_routes():
    """Dense and routed twins drop the same labels, so that they differ in their routes alone."""
    seen = []
    for net in (small_dit().train(), small_dit([PAPER]).train()):
        net.y_embedder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        net(*small_batch(64), generator=seeded(1))
    assert torch.equal(*seen)
    assert 0 < (seen[0] == 10).sum() < 20


@pytest.mark.parametrize("num_classes", [0, 1, 2000])
def test_any_number_of_classes(num_classes):
    net = small_dit(num_classes=num_classes)
    assert net(*small_batch(num_classes=num_classes)).shape == (4, 3, 8, 8)
    if num_classes:
        assert net.y_embedder.embedding_table.weight.shape[0] == num_classes + 1


@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_backends_agree(backend, dtype):
    """Values and gradients agree with the definition in fp64."""
    qkv = torch.randn(3, 2, 4, 16, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv.unbind(0)
    weight = torch.randn(2, 4, 16, 8)
    reference = (q @ k.mT / 8**0.5).softmax(dim=-1) @ v
    ours = attention(*qkv.to(dtype).unbind(0), backend)
    assert ours.dtype == dtype
    gradients = [torch.autograd.grad((x * weight).sum(), qkv)[0] for x in (reference, ours)]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(ours.double(), reference, **tolerance)
    torch.testing.assert_close(*gradients[::-1], **tolerance)


def test_attention_is_explicit_on_a_cpu_in_bf16_unless_a_backend_is_given():
    bf16, fp32 = torch.bfloat16, torch.float32
    requests = [("auto", "cpu", bf16), ("auto", "cpu", fp32), ("auto", "cuda", bf16), ("auto", "cuda", fp32)]
    requests += [("sdpa", "cpu", bf16), ("explicit", "cpu", bf16)]
    chosen = [resolve_attention(*request) for request in requests]
    assert chosen == ["explicit", "sdpa", "sdpa", "sdpa", "sdpa", "explicit"]


@pytest.mark.parametrize("backend", ["sdpa", "explicit"])
def test_every_block_takes_the_backend_of_the_network(backend, monkeypatch):
    calls, name = [], "models.layers.F.scaled_dot_product_attention"
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(name, lambda *qkv: calls.append(1) or fused(*qkv))
    small_dit(attention=backend)(*small_batch())
    assert len(calls) == (8 if backend == "sdpa" else 0)


@pytest.mark.slow
def test_the_compiled_gelu_is_the_same_function():
    x = torch.linspace(-12, 12, 1001, requires_grad=True)
    reference, compiled = GELU()(x.double()), torch.compile(GELU(), dynamic=False)(x)
    torch.testing.assert_close(compiled.double(), reference, rtol=1e-5, atol=1e-6)
    # Where 1 + tanh loses all digits in fp32, only the compiled form is exact.
    far = (x > -6.5) & (x < -5)
    torch.testing.assert_close(compiled[far].double(), reference[far], rtol=1e-3, atol=0)
    gradients = (torch.autograd.grad(y.sum(), x)[0] for y in (compiled, reference))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"routing": Routing(0.5)}, r"selection_ratio=0.5 must be in \[0, 1\]: .* each of 0"),
        ({}, {"routing": Routing([0.5])}, r"selection_ratio=\[0.5\] must be in .* each of 0"),
        ({"routes": [PAPER]}, {"routing": Routing(1.1)}, r"selection_ratio=1.1 must be in \[0, 1\]"),
        ({"routes": [PAPER]}, {"class_labels": None}, "class_labels must be given for model.num_classes=10"),
        ({"num_classes": 0}, {}, "class_labels must be None for model.num_classes=0"),
    ],
)
def test_bad_forward_arguments_are_refused(options, changes, message):
    arguments = dict(zip(("x", "c_noise", "class_labels"), small_batch(), strict=True))
    with pytest.raises(ValueError, match=message):
        small_dit(**options)(**arguments | changes)
