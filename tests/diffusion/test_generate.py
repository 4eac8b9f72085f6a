from functools import partial

import numpy as np
import pytest
import torch

from builders.drawing import Drawing, DrawOptions, ImageModel
from diffusion import CFG, EDMPrecond, SparseGuidance, edm_sampler, generate, random_labels
from tests.networks import PAPER, seeded, small_dit

PRECOND = EDMPrecond(small_dit([PAPER])).eval()
CPU = torch.device("cpu")
TWO_STEPS = partial(edm_sampler, num_steps=2)


def drawn(batch_size, guidance, **sampler):
    """Draw ten latents in batches."""
    sampler, latents = partial(edm_sampler, num_steps=4, **sampler), []
    for seeds in torch.arange(10).split(batch_size):
        options = {"seeds": seeds.tolist(), "class_labels": seeds, "device": CPU}
        latents.append(generate(PRECOND, sampler, guidance, **options))
    return torch.cat(latents)


def images(num_samples, sampler=TWO_STEPS, guidance_scale=1.0, classes=range(10), **options):
    """Draw images and labels in batches of 3."""
    decode = lambda x: x.permute(0, 2, 3, 1).numpy()  # noqa: E731
    model = ImageModel(PRECOND, sampler, CFG(guidance_scale), decode, CPU, classes)
    drawn = Drawing(model, DrawOptions(num_samples, 3, **options))
    parts = drawn.batches(3, range(-(-num_samples // drawn.part_size)))
    return np.concatenate([part.images for part in parts]), drawn.labels()


def labels(num_samples, start=0, classes=range(10), **options):
    model = ImageModel(PRECOND, TWO_STEPS, CFG(), None, CPU, classes)
    return Drawing(model, DrawOptions(num_samples, 3, **options)).labels(start).tolist()


@pytest.mark.parametrize("churn", [{}, {"S_churn": 10}])
@pytest.mark.parametrize(
    "guidance", [CFG(), SparseGuidance(2.0, strong_ratio=0.25), SparseGuidance(2.0, masks="fixed")]
)
def test_a_sample_does_not_depend_on_its_batch(guidance, churn):
    whole, in_threes = drawn(10, guidance, **churn), drawn(3, guidance, **churn)
    # One grey level is 1 / 127.5.
    assert (whole - in_threes).abs().max() < 1 / 127.5
    assert (whole[0] - whole[1]).abs().max() > 0.1


def test_a_model_neither_routes_nor_drops_labels():
    expected, _ = images(3)
    PRECOND.train()
    assert (images(3)[0] == expected).all()


def test_a_model_guides_away_from_the_null_class():
    def evaluate_once(denoise, noise, path, *, randn_like):
        assert path is PRECOND.path
        return denoise(noise, torch.tensor(0.5))

    drawn, classes = images(2, evaluate_once, guidance_scale=3.0, first_seed=5)
    noise = torch.stack([torch.randn(3, 8, 8, generator=seeded(s)) for s in (5, 6)])
    with torch.no_grad():
        D_s, D_w = (PRECOND(noise, torch.tensor(0.5), torch.tensor(y)) for y in (classes, [10, 10]))
    expected = D_w + 3 * (D_s - D_w)
    np.testing.assert_allclose(drawn, expected.permute(0, 2, 3, 1), rtol=1e-3, atol=1e-4)


def test_random_labels_depend_on_their_seed_alone():
    many = random_labels(range(3000), 10)
    assert torch.equal(random_labels(range(1000, 1010), 10), many[1000:1010])
    counts = many.bincount(minlength=10)
    assert len(counts) == 10
    assert (counts - 300).abs().max() < 100
    whole, _ = images(8, labels="random")
    rest, classes = images(3, labels="random", first_seed=5)
    np.testing.assert_allclose(rest, whole[5:], atol=1e-5)
    assert classes.tolist() == many[5:8].tolist()


def test_labels_follow_the_request():
    assert labels(12) == [*range(10), 0, 1]
    assert labels(3, class_label=4) == [4, 4, 4]
    assert labels(2, class_label=0, labels="random") == [0, 0]


def test_classes_that_were_not_trained_are_never_drawn():
    trained = [1, 4, 9]
    for kind in ("random", "balanced"):
        some = labels(60, classes=trained, labels=kind)
        assert sorted(set(some)) == trained
        assert some[20:] == labels(60, 20, classes=trained, labels=kind)


def test_samples_in_bf16_are_near_those_in_fp32():
    one, _ = images(3)
    other, _ = images(3, mixed_precision="bf16")
    assert one.dtype == other.dtype == np.float32
    assert 0 < np.abs(one - other).max() < 0.05 * np.abs(one).max()
