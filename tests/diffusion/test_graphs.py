"""Forwards that are recorded and replayed, on a GPU, and by a stand-in for the recorder on a CPU."""

import gc
import weakref
from functools import partial

import pytest
import torch

from builders.drawing import Drawing, DrawOptions, ImageModel
from diffusion import CFG, EDMPrecond, SparseGuidance, edm_sampler
from diffusion.graphs import replay_forward
from routing import Routing
from tests.networks import PAPER, small_batch, small_dit

GUIDANCE = {
    "none": CFG(),
    "an interval": CFG(2.0, guidance_interval=[0.1, 5.0]),
    "sparse": SparseGuidance(2.0, strong_ratio=0.25),
}
RECORDED = []


def record(function, inputs):
    """Replay as CUDA does: one place for each input, and one for the output, which the next call reuses."""
    inputs = [tensor.clone() for tensor in inputs]
    output = function(*inputs)
    RECORDED.append(len(inputs[0]))

    def replay(*given):
        for place, tensor in zip(inputs, given, strict=True):
            place.copy_(tensor)
        output.copy_(function(*inputs))
        return output.clone()

    return replay


@pytest.fixture
def replayed():
    RECORDED.clear()
    net = small_dit([PAPER]).eval()
    for _ in range(2):
        replay_forward(net, lambda: record)
    return net


def model_of(net, guidance, device="cpu", **sampler):
    sampler = partial(edm_sampler, num_steps=5, **sampler)
    return ImageModel(EDMPrecond(net.to(device)), sampler, guidance, None, torch.device(device), range(10))


def latents_of(net, guidance, device="cpu", compiled=False, bf16=False):
    model = model_of(net, guidance, device)
    options = DrawOptions(8, 4, mixed_precision="bf16" if bf16 else "no")
    if compiled:
        model = model.compiled
    images = Drawing(model, options)
    return [images.latents(part)[0].cpu() for part in (0, 1)]


@pytest.mark.parametrize("name", GUIDANCE)
def test_replayed_forwards_give_the_same_samples(replayed, name):
    found = latents_of(replayed, GUIDANCE[name])
    expected = latents_of(small_dit([PAPER]), GUIDANCE[name])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    # One recording for each kind of input: with and without the guided branch, or of each length.
    assert sorted(RECORDED) == {"none": [4], "an interval": [4, 8], "sparse": [4, 4]}[name]


def test_what_draws_or_learns_is_not_replayed(replayed):
    x, c_noise, labels = small_batch()
    noise = [torch.rand(4, replayed.num_tokens)]
    replayed(x, c_noise, labels).sum().backward()
    with torch.no_grad():
        replayed(x, c_noise, labels, generator=torch.Generator())
        replayed(x, c_noise, labels, routing=Routing(0.5))
        keep = torch.zeros(4, replayed.num_tokens, dtype=torch.bool)
        replayed(x, c_noise, labels, routing=Routing(0.5, force_keep=keep, noise=noise))
        assert RECORDED == []
        one = replayed(x, c_noise, labels, routing=Routing(0.5, noise=noise))
        other = replayed(2 * x, c_noise, labels, routing=Routing(0.5, noise=noise))
    assert not torch.equal(one, other), "each call has an output of its own"
    assert RECORDED == [4]


def test_a_network_that_replays_goes_with_its_last_reference():
    net = small_dit()
    replay_forward(net, lambda: record)
    with torch.no_grad():
        net.eval()(*small_batch())
    gone = weakref.ref(net)
    gc.disable()
    try:
        del net
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", GUIDANCE)
@pytest.mark.parametrize("bf16", [False, True])
def test_samples_on_a_gpu_are_those_of_eager_forwards(name, bf16):
    eager = latents_of(small_dit([PAPER]), GUIDANCE[name], "cuda", bf16=bf16)
    replayed = latents_of(small_dit([PAPER]), GUIDANCE[name], "cuda", compiled=True, bf16=bf16)
    for one, other in zip(replayed, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05 if bf16 else 1e-3, atol=0.1 if bf16 else 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device_inside_a_trajectory():
    model = model_of(small_dit([PAPER]), GUIDANCE["sparse"], "cuda", S_churn=10).compiled
    images = Drawing(model, DrawOptions(8, 4))
    images.latents(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        images.latents(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
