"""Auxiliary losses of tokens after a block, against independent transcriptions of their formulas."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from builders.sampling import open_run
from routing import Route, Routing
from tests.networks import small_batch as batch
from tests.networks import small_dit
from tests.programs import start
from tests.runs import TINY, metrics, tiny_run, tiny_trainer
from training.alignment import IREPA, REPA, SRA2

ROUTES = (Route(0.5, 1, 3),)


def network(**options):
    return small_dit(depth=5, class_dropout_prob=0.0, **options).train()


def hidden_after(net, block, x, c_noise, labels, **kwargs):
    """The input of the next block, and the output of the network."""
    seen = []
    handle = net.blocks[block].register_forward_hook(lambda module, args, output: seen.append(output))
    F_x = net(x, c_noise, labels, **kwargs)
    handle.remove()
    return seen[0], F_x


def test_sra2_is_the_smooth_l1_loss_against_the_clean_patch():
    net, (x, c_noise, labels) = network(), batch()
    alignment = SRA2(block=2, num_layers=3, width=8)
    alignment.attach(net, None)
    hidden, _ = hidden_after(net, 2, x, c_noise, labels)
    losses = alignment.loss(net, x, None, step=0)
    state = net.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in network().state_dict().items())
    layers = [layer for layer in net.projector if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [8, 8, 12]
    h = hidden.detach().double().numpy()  # (4, 16, 32)
    for n, layer in enumerate(layers):
        weight, bias = (parameter.detach().double().numpy() for parameter in (layer.weight, layer.bias))
        h = (h / (1 + np.exp(-h)) if n else h) @ weight.T + bias
    patches = x.view(4, 3, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(4, 16, 12)
    d = np.abs(h - patches.double().numpy())
    errors = np.where(d > 0.05, d - 0.025, d**2 / 0.1).mean(axis=(1, 2))
    assert losses.tolist() == pytest.approx(errors.tolist(), rel=1e-5)


def test_the_published_projector_of_b_has_about_8_million_weights():
    alignment = SRA2()
    size = sum(p.numel() for p in alignment.projector(768, 16, 16).parameters())
    assert alignment.block == 1 and size == pytest.approx(8.3e6, rel=0.01)


def test_repa_is_the_mean_cosine_with_the_features():
    net, (x, c_noise, labels) = network(), batch()
    features = torch.randn(4, 16, 7, generator=torch.Generator().manual_seed(2))
    alignment = REPA(block=1, width=8)
    alignment.attach(net, (16, 7))
    hidden, _ = hidden_after(net, 1, x, c_noise, labels)
    h, y = net.projector(hidden).detach().double().numpy(), features.double().numpy()
    cosines = (h * y).sum(-1) / np.linalg.norm(h, axis=-1) / np.linalg.norm(y, axis=-1)
    losses = alignment.loss(net, x, features.half(), step=0)
    assert losses.tolist() == pytest.approx((-cosines.mean(axis=1)).tolist(), abs=1e-3), "features are fp16"
    assert [layer.out_features for layer in net.projector if hasattr(layer, "weight")] == [8, 8, 7]


def test_irepa_convolves_the_grid_and_normalises_features_over_tokens():
    net, (x, c_noise, labels) = network(), batch()
    features = torch.randn(4, 16, 7, generator=torch.Generator().manual_seed(2))
    alignment = IREPA(block=1)
    alignment.attach(net, (16, 7))
    hidden, _ = hidden_after(net, 1, x, c_noise, labels)
    grid = torch.zeros(4, 6, 6, 32, dtype=torch.float64)
    grid[:, 1:5, 1:5] = hidden.detach().double().view(4, 4, 4, 32)  # padded by zeros
    weight, bias = (p.detach().double() for p in net.projector.parameters())
    h = bias.expand(4, 4, 4, 7).clone()
    for row in range(3):
        for column in range(3):
            h += grid[:, row : row + 4, column : column + 4] @ weight[:, :, row, column].T
    y = features.double().numpy()
    y = (y - y.mean(axis=1, keepdims=True)) / (y.std(axis=1, ddof=1, keepdims=True) + 1e-6)
    h = h.view(4, 16, 7).numpy()
    cosines = (h * y).sum(-1) / np.linalg.norm(h, axis=-1) / np.linalg.norm(y, axis=-1)
    losses = alignment.loss(net, x, features, 0).tolist()
    assert losses == pytest.approx((-cosines.mean(1)).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("window", "prefix"), [("bypass", 0), ("bypass", 2), ("context", 0), ("context", 2), ("separate", 0)]
)
def test_bypassing_tokens_are_read_as_they_entered_the_window(window, prefix):
    net, (x, c_noise, labels) = network(routes=ROUTES, window=window, num_prefix_tokens=prefix), batch()
    net.add_projector(lambda width: torch.nn.Identity(), 2)
    noise = torch.rand(4, 16, generator=torch.Generator().manual_seed(3))
    entered, _ = hidden_after(net, 0, x, c_noise, labels, routing=Routing(0.5, noise=[noise]))
    inside, _ = hidden_after(net, 2, x, c_noise, labels, routing=Routing(0.5, noise=[noise]))
    tokens, kept = net.projected
    is_kept = noise.argsort(1).argsort(1) < 8
    assert torch.equal(kept, is_kept) if window == "bypass" else kept is None, "the others are processed too"
    entered, expected = entered[:, prefix:], inside[:, prefix:]
    if window != "context":  # there the others stay in the window
        expected = entered.masked_scatter(is_kept[..., None], expected)
    assert torch.allclose(tokens[is_kept], expected[is_kept])
    # Under `separate`, the others passed the blocks as a second sequence.
    assert torch.allclose(tokens[~is_kept], expected[~is_kept]) == (window != "separate")


@pytest.mark.parametrize(("block", "whole"), [(0, True), (1, False), (3, False), (4, True)])
def test_only_blocks_of_the_window_have_kept_tokens(block, whole):
    net, (x, c_noise, labels) = network(routes=ROUTES), batch()
    net.add_projector(lambda width: torch.nn.Identity(), block)
    net(x, c_noise, labels)
    tokens, kept = net.projected
    assert tokens.shape == (4, 16, 32)
    assert kept is None if whole else kept.sum(dim=1).tolist() == [8] * 4
    net(x, c_noise, labels, routing=Routing(0))
    assert net.projected[1] is None, "a dense step keeps all tokens"
    net(x, c_noise, labels, routing=Routing(1))
    assert net.projected[1] is None if whole else not net.projected[1].any(), "a skipped window keeps none"


def test_kept_tokens_alone_count_if_the_alignment_says_so():
    net, (x, c_noise, labels) = network(routes=ROUTES), batch()
    features = torch.randn(4, 16, 7)
    losses = {}
    for tokens in ("all", "kept"):
        alignment = REPA(block=2, width=8, tokens=tokens)
        torch.manual_seed(5)
        alignment.attach(net, (16, 7))
        net(x, c_noise, labels, generator=torch.Generator().manual_seed(4))
        predicted, kept = net.projected
        errors = alignment.error(predicted, features)
        losses[tokens] = alignment.loss(net, x, features, 0), errors, kept
    assert torch.allclose(losses["all"][0], losses["all"][1].mean(dim=1))
    loss, errors, kept = losses["kept"]
    assert loss.tolist() == pytest.approx([errors[i, kept[i]].mean().item() for i in range(4)])


def test_the_loss_ends_at_a_step_but_its_gradient_exists():
    """Other processes wait for the gradients of all weights."""
    net, (x, c_noise, labels) = network(), batch()
    alignment = SRA2(block=1, until_step=3, width=8)
    alignment.attach(net, None)
    for step in (0, 2, 3, 4):
        net.zero_grad()
        net(x, c_noise, labels)
        loss = alignment.loss(net, x, None, step)
        assert net.projected is None, "the graph is released"
        loss.mean().backward()
        gradients = [p.grad for p in net.projector.parameters()]
        assert all(g is not None for g in gradients)
        assert any(g.any() for g in gradients) == bool(loss.any()) == (step < 3)
    net.eval()(x, c_noise, labels)
    assert net.projected is None, "only training projects"


def test_the_cost_of_the_projector_is_counted():
    net = network()
    plain = net.flops(())
    SRA2(block=1, num_layers=2, width=8).attach(net, None)
    aligned = net.flops(())
    assert aligned.forward == plain.forward, "sampling does not use it"
    assert aligned.training - plain.training == 3 * 16 * 2 * (32 * 8 + 8 * 12)
    IREPA(block=1).attach(net, (16, 7))
    assert net.flops(()).training - plain.training == 3 * 16 * 2 * 9 * 32 * 7


@pytest.mark.parametrize(("shape", "given"), [(None, "have none"), ((4, 7), "have them for 4")])
def test_missing_features_are_named(shape, given):
    with pytest.raises(ValueError, match=f"the images {given}"):
        REPA(block=1).attach(network(), shape)


@pytest.mark.slow
def test_one_process_two_and_two_that_share_weights_train_alike(tmp_path):
    """With an inner head, a projector, two averages, micro-batches and a window. Up to the order of sums."""
    keys = (*TINY, "model.init=xavier", "optimizer.eps=1e-3", "alignment=sra2", "alignment.block=3")
    keys += ("model.inner_head=3", "ema=post_hoc", "train.milestone_every=2", "train.micro_batch_size=2")
    keys += ("train.log_every=1", "run_name=r")
    lines, averages = [], []
    for number, parallel in ((1, "ddp"), (2, "ddp"), (2, "fsdp")):
        folder = tmp_path / f"{parallel}_{number}"
        start("train.py", *keys, f"train.parallel={parallel}", f"output_dir={folder}", num_processes=number)
        lines.append(metrics(folder))
        files = (folder / f"checkpoints/step_00000006/{part}.safetensors" for part in ("ema", "ema_wide"))
        averages.append([load_file(file) for file in files])
    for others, tensors in zip(lines[1:], averages[1:], strict=True):
        for line, other in zip(lines[0], others, strict=True):
            assert other == {key: pytest.approx(value, rel=1e-4) for key, value in line.items()}
        torch.testing.assert_close(tensors, averages[0], rtol=1e-5, atol=1e-4)
    assert all(any(key.startswith("projector.") for key in tensors) for tensors in averages[0])
    assert all(line["alignment_loss"] > 0 for line in lines[0] if "loss" in line)


def test_weights_load_without_their_projector(tmp_path):
    """Sampling does not build it, and a training may start from weights with another or none."""
    keys = ("train.total_steps=2", "train.eval_every=null", "model.init=xavier")
    tiny_run(tmp_path / "aligned", *keys, "alignment=sra2")
    tiny_run(tmp_path / "plain", *keys)
    assert open_run(tmp_path / "aligned").precond.net.projector is None
    sra2 = ("alignment=sra2",)
    for source, more in (("aligned", ()), ("aligned", (*sra2, "alignment.width=8")), ("plain", sra2)):
        folder = tmp_path / f"from_{source}_{len(more)}"
        trainer, run = tiny_trainer(folder, *keys, *more, f"train.init_from={tmp_path / source}")
        run.unlock()
        loaded = load_file(tmp_path / source / "checkpoints/step_00000002/ema.safetensors")
        state = trainer.net.state_dict()
        same = [name for name in loaded if not name.startswith("projector.")]
        assert all(torch.equal(state[name], loaded[name]) for name in same) and len(same) > 50
