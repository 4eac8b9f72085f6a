"""The suite on a few images, with an Inception network of random weights."""

import os
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm

from data import open_images
from evaluation import (
    FrechetDistance,
    InceptionDetector,
    PixelDetector,
    Reference,
    Suite,
    kernel_distance,
    make_reference,
    open_reference,
    precision_recall,
)
from evaluation.adm import with_count
from evaluation.detectors.random_weights import random_state
from evaluation.features import ArrayImages, add_up, look
from evaluation.statistics import AllFeatures, FeatureStatistics
from runtime.launch import ALONE, Launch
from runtime.machine import start_process
from tests.evaluation.test_metrics import plain_precision_recall
from tests.inception import Remembering, adm_suite, write_random_weights


def pictures(count, seed):
    rng = np.random.default_rng(seed)
    return (rng.random((count, 24, 24, 1)) * 100 + rng.integers(0, 150, (count, 1, 1, 3))).astype(np.uint8)


SAMPLES, REFERENCE = pictures(22, 1), pictures(17, 2)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_random_weights(tmp_path_factory.mktemp("weights") / "random.pth")


@pytest.fixture(scope="module")
def detector(weights):
    return Remembering(weights)


@pytest.fixture(scope="module")
def features(detector):
    return {name: detector(images) for name, images in (("samples", SAMPLES), ("reference", REFERENCE))}


@pytest.fixture
def folder(tmp_path):
    np.savez(tmp_path / "samples.npz", SAMPLES)
    np.savez(tmp_path / "images.npz", REFERENCE)
    return tmp_path


def moments(f):
    f = f.double().numpy()
    return f.mean(0), np.cov(f.T)


def plain_distance(one, other):
    """The published definition, by the matrix square root, in the few dimensions that the features span."""
    basis = torch.linalg.qr(torch.cat([one, other]).double().T).Q
    (mu1, sigma1), (mu2, sigma2) = moments(one.double() @ basis), moments(other.double() @ basis)
    return ((mu1 - mu2) ** 2).sum() + np.trace(sigma1 + sigma2 - 2 * sqrtm(sigma1 @ sigma2).real)


def scores(detector, folder, reference, **options):
    samples = open_images(folder / "samples.npz")
    suite = adm_suite(detector, open_reference(folder / reference, open_images), **options)
    return suite.score(samples)


def test_scores_agree_with_the_definitions(detector, features, folder):
    found = scores(detector, folder, "images.npz")
    assert not found.left_out
    values, one, other = found.values, features["samples"], features["reference"]
    # The covariances are singular, and the matrix square root of such is good to some digits only.
    assert values["fid22"] == pytest.approx(plain_distance(one["pool"], other["pool"]), rel=1e-3)
    assert values["sfid22"] == pytest.approx(plain_distance(one["spatial"], other["spatial"]), rel=1e-3)
    p = one["logits"].double().softmax(1).numpy()
    divergence = (p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean()
    assert values["is22"] == pytest.approx(np.exp(divergence), rel=1e-6)
    expected = plain_precision_recall(other["pool"].numpy(), one["pool"].numpy(), 3, 10_000)
    assert (values["precision22"], values["recall22"]) == pytest.approx(expected, abs=0.06)
    expected = kernel_distance(other["pool"], one["pool"], subset_size=8)  # half of the smaller set
    assert (values["kid22"], values["kid_std22"]) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert values.keys() == {"fid22", "sfid22", "is22", "precision22", "recall22", "kid22", "kid_std22"}


def test_the_same_images_are_at_distance_zero_and_covered(detector, folder):
    np.savez(folder / "images.npz", SAMPLES)
    values = scores(detector, folder, "images.npz").values
    assert values["fid22"] == pytest.approx(0, abs=1e-3)
    assert values["sfid22"] == pytest.approx(0, abs=1e-3)
    assert values["precision22"] == values["recall22"] == 1


def test_what_a_reference_does_not_hold_is_left_out_with_the_reason(detector, features, folder):
    mu, sigma = moments(features["reference"]["pool"])
    np.savez(folder / "edm.npz", mu=mu, sigma=sigma)
    found = scores(detector, folder, "edm.npz")
    assert found.values.keys() == {"fid22", "is22"}
    assert found.left_out == {
        "sfid22": "the reference has no mu_s and sigma_s",
        **dict.fromkeys(
            ("precision22", "recall22", "kid22", "kid_std22"), "the reference has no images (arr_0)"
        ),
    }
    whole = scores(detector, folder, "images.npz", precision_recall=False, kid=False)
    assert whole.values["fid22"] == pytest.approx(found.values["fid22"], rel=1e-6)
    assert not whole.left_out


def test_a_reference_that_is_made_scores_like_its_images(detector, folder):
    images = open_images(folder / "images.npz")
    record = make_reference(detector, images, folder / "all.npz", 8, Launch())
    assert record == {"num_images": 17, "num_kept": 17, "shape": (24, 24, 3), "batch_size": 8}
    with np.load(folder / "all.npz") as made:
        assert {name: made[name].shape for name in made} == {
            "mu": (2048,),
            "sigma": (2048, 2048),
            "mu_s": (2023,),
            "sigma_s": (2023, 2023),
            "arr_0": REFERENCE.shape,
            "weights": (),
        }
    direct = scores(detector, folder, "images.npz")
    assert scores(detector, folder, "all.npz").values == pytest.approx(direct.values, rel=1e-9)


def test_a_reference_is_of_no_use_to_other_weights(detector, folder, tmp_path):
    make_reference(detector, open_images(folder / "images.npz"), folder / "made.npz", 8, Launch())
    state = random_state()
    state["Mixed_7c.branch_pool.conv.weight"] *= 1.01
    torch.save(state, tmp_path / "other.pth")
    other, reference = (
        InceptionDetector(tmp_path / "other.pth", allow_unpublished=True),
        open_reference(folder / "made.npz", open_images),
    )
    for _ in range(2):  # the reference stays what it is
        with pytest.raises(ValueError, match=r"statistics .* are of another network than .*other.pth"):
            adm_suite(other, reference)


def test_statistics_are_of_no_use_to_another_detector(tmp_path):
    """Also to one whose features have the same name and size."""
    np.savez(tmp_path / "edm.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    asked = {"num_samples": 5, "labels": "random", "launch": Launch()}
    metrics = {"distance": FrechetDistance("fd", "pool")}
    with pytest.raises(ValueError, match=r"statistics .* are of another network than PixelDetector"):
        Suite(
            open_reference(tmp_path / "edm.npz", open_images),
            detector=PixelDetector(),
            metrics=metrics,
            **asked,
        )


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("name", ["mu", "arr_0"])
def test_a_reference_packed_as_numpy_does_not_is_refused(tmp_path, method, name):
    """Even where what is packed is damaged."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", method) as archive:
        archive.writestr(f"{name}.npy", bytes(10_000))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[50:60] = bytes(10)
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"cannot be read as an .npz.* is packed by method"):
        open_reference(tmp_path / "x.npz", open_images)


def test_batches_and_order_matter_only_for_splits(weights, folder):
    detector = InceptionDetector(weights, allow_unpublished=True)

    def statistics(images, batch_size):
        np.savez(folder / "x.npz", images)
        opened = open_images(folder / "x.npz")
        needs = [(FeatureStatistics, "pool"), (FeatureStatistics, "spatial"), (AllFeatures, "pool")]
        parts = look(detector, opened, batch_size=batch_size, launch=ALONE, description="")
        found, _ = add_up(parts, needs, opened.count, ALONE.device)
        return (*(found[need] for need in needs),)

    (pool, spatial, kept), (others, other_spatial, others_kept) = (
        statistics(SAMPLES[:7], 4),
        statistics(SAMPLES[6::-1], 3),
    )
    torch.testing.assert_close(pool.mean, others.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(spatial.covariance, other_spatial.covariance, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(kept.features, others_kept.features[::-1], rtol=1e-3, atol=1e-4)


def test_parts_are_split_to_the_detectors_size():
    class Drawn(ArrayImages):
        part_size = 5

    seen = []

    def detector(images):
        seen.append(len(images))
        return {"pool": images.reshape(len(images), -1)}

    images = Drawn(np.arange(12, dtype=np.uint8).reshape(12, 1, 1, 1))
    parts = [*look(detector, images, batch_size=2, launch=ALONE, description="")]
    assert seen == [2, 2, 1, 2, 2, 1, 2]
    assert np.concatenate([part["pool"] for part in parts]).ravel().tolist() == list(range(12))


def test_lost_images_are_noticed(detector, folder):
    parts = [*look(detector, open_images(folder / "images.npz"), batch_size=8, launch=ALONE, description="")]
    with pytest.raises(ValueError, match="16 images came instead of 17"):
        add_up(parts[:2], [], 17, ALONE.device)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mu": np.zeros(2048)}, "must hold both of mu and sigma, or neither"),
        (
            {"mu": np.zeros(64), "sigma": np.zeros((64, 64))},
            "mu is (64,), must be (2048,): of another network",
        ),
        ({"mu": np.zeros(2048), "sigma": np.full((2048, 2048), np.nan)}, "sigma must be finite"),
        (
            {"mu": np.zeros(2048), "sigma": -np.eye(2048)},
            "sigma must be symmetric, without negative eigenvalues",
        ),
        ({"mu": np.zeros(2048), "sigma": np.eye(2048) + np.tri(2048)}, "sigma must be symmetric"),
        ({"images": np.zeros(3)}, "must hold mu and sigma, or images (arr_0)"),
        ({"mu_s": np.zeros(2048), "sigma_s": np.zeros((2048, 2048))}, "mu_s is (2048,), must be (2023,)"),
        ({"mu": np.array([{}], dtype=object), "sigma": np.zeros(1)}, "cannot be read as an .npz"),
        ({"arr_0": np.zeros((5, 8, 8, 3))}, "arr_0 is float64"),
    ],
)
def test_files_that_are_not_references_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "reference.npz", **arrays)
    with pytest.raises(ValueError) as found:
        open_reference(tmp_path / "reference.npz", open_images)
    assert message in str(found.value)
    assert "reference.npz" in str(found.value)


def test_damaged_and_missing_references_are_refused(tmp_path):
    np.savez(tmp_path / "whole.npz", mu=np.zeros(2048), sigma=np.zeros((2048, 2048)))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:100_000])
    with pytest.raises(ValueError, match=r"cut.npz cannot be read as an .npz"):
        open_reference(tmp_path / "cut.npz", open_images)
    with pytest.raises(
        FileNotFoundError, match=r"reference=.*nowhere.npz not found; `python -m evaluation.fetch"
    ):
        open_reference(tmp_path / "nowhere.npz", open_images)


@pytest.mark.parametrize(
    ("num_images", "shape", "options", "message"),
    [
        (1, (8, 8, 3), {"precision_recall": False}, r"1 image\(s\) are too few: at least 2 are needed"),
        (3, (8, 8, 3), {}, r"3 image\(s\) are too few: at least 4 are needed for precision, recall"),
        (9, (8, 8, 1), {}, r"images are \(8, 8, 1\), must be \(H, W, 3\)"),
    ],
)
def test_images_that_cannot_be_scored_are_refused(detector, num_images, shape, options, message):
    suite = adm_suite(detector, Reference(), **options)
    with pytest.raises(ValueError, match=message):
        suite.check(num_images, shape, "samples")


def test_half_precision_is_the_default_and_can_be_turned_off(detector, folder):
    """Between images that hardly differ, distances are lost in the rounding of fp16."""
    rng = np.random.default_rng(5)
    images = (pictures(1, 0) // 2 + rng.integers(0, 4, (24, 24, 24, 3))).astype(np.uint8)
    np.savez(folder / "samples.npz", images[:12])
    np.savez(folder / "images.npz", images[12:])
    half, exact = (
        scores(detector, folder, "images.npz", exact_distances=e, kid=False).values for e in (False, True)
    )
    half, exact = ((values["precision12"], values["recall12"]) for values in (half, exact))
    assert half != exact
    assert exact == precision_recall(detector(images[12:])["pool"], detector(images[:12])["pool"], exact=True)


def test_scores_are_strict_fp32_whatever_else_is_allowed(detector, monkeypatch):
    """Every product and convolution of a score runs without TF32; what was allowed before is allowed again
    afterwards.
    """
    found = []

    def look(*_):
        found.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))

    def matmul(a, b, plain=torch.Tensor.__matmul__):
        look()
        return plain(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", matmul)
    start_process()
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (True, True)
    hook = detector._network.Conv2d_1a_3x3.register_forward_hook(look)
    features = InceptionDetector.__call__(detector, SAMPLES[:5])["pool"]
    hook.remove()
    for exact in (False, True):
        precision_recall(features, features, exact=exact)
    assert set(found) == {(False, False)}
    assert len(found) > 5
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (True, True)


def test_a_reference_that_cannot_be_used_shows_before_samples_are_drawn(detector, tmp_path):
    (tmp_path / "images").mkdir()
    for i, mode in enumerate(("RGB", "RGB", "RGB", "RGB", "L")):
        Image.fromarray(REFERENCE[i]).convert(mode).save(tmp_path / "images" / f"{i}.png")
    suite = adm_suite(detector, open_reference(tmp_path / "images", open_images))

    class Drawn(ArrayImages):
        def batches(self, batch_size, parts):
            raise AssertionError("a sample was drawn")

    with pytest.raises(ValueError, match=r"4.png cannot be used: its mode is L"):
        suite.score(Drawn(SAMPLES))


def test_few_samples_and_unpublished_weights_give_warnings(detector, folder):
    warnings = " ".join(scores(detector, folder, "images.npz", precision_recall=False, kid=False).warnings)
    for part in (
        "published scores are of 50,000 samples",
        "the covariance is singular",
        "checked by names and shapes alone",
    ):
        assert part in warnings


def test_names_carry_the_count():
    assert [with_count("fid", n) for n in (50_000, 5000, 512, 1500)] == [
        "fid50k",
        "fid5k",
        "fid512",
        "fid1500",
    ]


GOLDEN = ("ADM_WEIGHTS", "ADM_REFERENCE", "ADM_SAMPLES")


@pytest.mark.slow
@pytest.mark.skipif(
    not all(os.environ.get(name) for name in GOLDEN),
    reason=f"needs {', '.join(GOLDEN)}: paths of `python -m evaluation.fetch "
    f"inception imagenet256 golden256`",
)
def test_published_scores_of_adm(tmp_path):
    """Scores that the original gives for the samples of ADM-G and ADM-U, ImageNet 256x256. [ADM]"""
    weights, reference, samples = (os.environ[name] for name in GOLDEN)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = open_images(samples)
    launch = Launch(device=torch.device(device))
    options = {"batch_size": 64, "kid": False, "launch": launch}
    suite = adm_suite(InceptionDetector(weights, device), open_reference(reference, open_images), **options)
    values = suite.score(images).values
    expected = {
        "is": (215.837, 0.3),
        "fid": (3.94256, 0.005),
        "sfid": (6.14043, 0.02),
        "precision": (0.8265, 0.005),
    }
    expected["recall"] = (0.5309, 0.005)
    for metric, (value, tolerance) in expected.items():
        assert values[f"{metric}50k"] == pytest.approx(value, abs=tolerance), metric
