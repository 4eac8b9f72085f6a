"""SPRINT's network: its published files give its outputs, its size and its cost."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from models import cost_of
from routing import Routing
from study.published import expected, read_header
from tests.latents import write_latents
from tests.public_dit import CHANNELS, CLASSES, PATCH, WIDTH, PublicSprint, public
from tests.runs import open_weights_file


def saved(state, file, prefix=""):
    state = {prefix + name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, file) if file.suffix == ".safetensors" else torch.save(state, file)
    return file


def inputs(side, num_samples=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, CHANNELS, side, side, generator=generator)
    return x, torch.tensor([0.1, 0.6, 0.97]), torch.tensor([1, 9, 10])


@pytest.mark.parametrize(
    "name, prefix, side",
    [("model_1.safetensors", "", 32), ("a.safetensors", "_orig_mod.", 8), ("a.pt", "module.", 8)],
)
def test_a_file_gives_the_outputs_of_its_network(name, prefix, side, tmp_path):
    """Dense, with a sparse middle, and without one as in path-drop guidance."""
    net = public(PublicSprint)
    state = net.state_dict() | {"projectors.0.weight": torch.zeros(3, 3)}  # as in its run with REPA
    latents, zeros = str(tmp_path / "latents"), np.zeros((2, CHANNELS, side, side))
    write_latents(latents, zeros, np.zeros(2, np.int64), encoder="OWNER/NAME", num_classes=CLASSES)
    file = saved(state, tmp_path / name, prefix)
    opened = open_weights_file(file, "flow", latents=None if side == 32 else latents)
    ours, kept, (x, t, y) = opened.precond.net, [], inputs(side)
    assert ours.latent_shape == (CHANNELS, side, side) and opened.experiment.method == "sprint"
    grid = ours.router
    ours.router = lambda *args, **kwargs: kept.append(grid(*args, **kwargs)) or kept[-1]
    with torch.no_grad():
        for ratio in (0, 0.75, 1):
            output = ours(x, t, y, routing=Routing(ratio))
            ids = {0: None, 0.75: kept[0] if kept else None, 1: torch.empty(3, 0, dtype=torch.long)}[ratio]
            torch.testing.assert_close(output, net(x, t, y, ids), rtol=1e-4, atol=1e-5)
        denoised = x - 0.6 * net(x, torch.full((3,), 0.6), y)  # x_t = (1 - t) x_0 + t eps, v = eps - x_0
        torch.testing.assert_close(opened.precond(x, torch.tensor(0.6), y), denoised, rtol=1e-4, atol=1e-5)
    assert len(kept) == 1 and kept[0].shape == (3, (side // PATCH) ** 2 // 4)


def without(name):
    return lambda state: state.pop(name)


def renamed(old, new):
    def change(state):
        for name in [name for name in state if name.startswith(old)]:
            state[name.replace(old, new)] = state.pop(name)

    return change


def shaped(name, *shape):
    return lambda state: state.update({name: torch.zeros(shape)})


NO_DIT, NOT_AS = "does not have the names and shapes of a DiT", r" is \({}\), which does not fit SPRINT's"
PATCHES, FIRST = "x_embedder.proj.weight", "blocks.2.attn.qkv.weight"
FUSION, BIAS = "renoise_linear.weight", "final_layer.linear.bias"
REFUSED = {
    "one dense block": (renamed("encoder_blocks.1.", "middle_blocks.3."), "has 1 encoder_blocks and 2"),
    "no sparse middle": (renamed("middle_blocks", "encoder_blocks"), "has 3 encoder_blocks and 2"),
    "no fusion": (without(FUSION), NO_DIT),
    "a short mask token": (shaped("mask_token"), r"rejoins\.0\.mask_token is \(1,\)"),
    "no QK-norm": (without("decoder_blocks.1.attn.q_norm.weight"), "blocks.6.attn.q_norm.weight is missing"),
    "a global modulation": (shaped("global_adaLN_modulation.1.bias", 9), "global_adaLN_modulation.1.bias is"),
    "two for one": (shaped(FIRST, 3 * WIDTH, WIDTH), f"has two tensors for {FIRST}"),
    "an odd patch": (shaped(PATCHES, WIDTH, 9), PATCHES + NOT_AS.format("384, 9")),
    "a convolution": (shaped(PATCHES, WIDTH, CHANNELS, PATCH, PATCH), NO_DIT),
    "a fusion of one axis": (shaped(FUSION, WIDTH), FUSION + NOT_AS.format("384,")),
    "an odd output": (shaped(BIAS, 9), BIAS + NOT_AS.format("9,")),
    "a block beyond all": (renamed("middle_blocks.2.", "middle_blocks.999."), "fewer than model.depth=1002"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_differs_from_the_public_network_is_refused(case, tmp_path):
    change, message = REFUSED[case]
    state = public(PublicSprint).state_dict()
    change(state)
    file = saved(state, tmp_path / "file.safetensors")
    with pytest.raises(ValueError, match=message) as refused:
        open_weights_file(file, "flow")
    assert str(refused.value).startswith(str(file)) and "\n" not in str(refused.value)


def test_the_rows_train_the_published_network_for_the_published_cost():
    """677.48 million parameters; 65.1e6 TFLOP at 400 epochs, 43.7e6 at 200 (forward passes alone)."""
    row = "imagenet256_sprint_xl_2_400ep"
    stages = [expected(*read_header(row)["from"][0].split()), expected(row)]
    nets = [stage.meta_net for stage in stages]
    costs = [cost_of(net) for net in nets]
    frozen = nets[0].rejoins[0].mask_token.numel()
    assert [round((cost.num_parameters + frozen) / 1e6, 2) for cost in costs] == [677.48, 677.48]
    images = [stage.train.total_steps * stage.train.batch_size for stage in stages]
    assert images[0] == pytest.approx(400 * 1_281_167, rel=1e-3)
    for share, published in ((1, 65.1), (1 / 2, 43.7)):
        first, second = (n * cost.routed_forward_flops for n, cost in zip(images, costs, strict=True))
        assert (share * first + second) / 1e18 == pytest.approx(published, rel=0.01)
